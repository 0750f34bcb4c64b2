"""The configuration: every key with its default, its unit, its range and its reason.

The two daemons read one file, so that they cannot disagree.  A default is written here and
nowhere else; the defaults suit the embedded 135-million-parameter model on a small machine.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.limits import DEFAULT_MAX_REQUEST_BYTES, MAX_TOKENS

MAX_REQUEST_BYTES = 64 << 20
"""Most that `limits.max_request_bytes` may be: fifty times the longest prompt that fits a model."""

Seconds = Annotated[float, Meta(ge=0.0, le=86_400.0)]
PositiveSeconds = Annotated[float, Meta(gt=0.0, le=86_400.0)]
NumBlocks = Annotated[
    int, Meta(ge=0, le=1 << 31, description="0, or a whole number from 2 to 2147483648")
]
"""0 is replaced: on a CPU by `DEFAULT_CPU_BLOCKS`, on a GPU by what its memory holds."""
DEFAULT_CPU_BLOCKS = 1024
"""16,384 tokens: two of the embedded model's longest prompts, 755 MB in float32."""
Device = Annotated[
    str,
    Meta(
        pattern=r"^(cpu|cuda(:[0-9]{1,3})?|(GPU|MIG)-[0-9a-fA-F-]{4,36})\Z",
        description="'cpu', 'cuda', 'cuda:N', or a GPU's UUID, 'GPU-…', or its beginning",
    ),
]
"""`cuda` is the first GPU that the process sees.  Only a UUID names one GPU in every process."""
MemoryFraction = Annotated[float, Meta(ge=0.0, le=1.0)]
DEFAULT_MEMORY_FRACTION = 0.85
"""Of what is free beside the weights and what steps need: the rest is slack."""
DEFAULT_TOKEN_BUDGETS = {"cpu": 512, "gpu": 2048}
LONE_BUDGET_FACTORS = {"cpu": 1, "gpu": 2}
"""A CPU computes a small step as fast as a large one."""
DEFAULT_MAX_BATCHES = {"cpu": 32, "gpu": 128}
Threads = Annotated[int, Meta(ge=0, le=1024)]
Text = Annotated[str, Meta(min_length=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """`[model]`: what is served."""

    path: Text = "smollm2-135m-instruct"
    """A name that `kvpair model list` knows, the path of a GGUF file or of a Hugging Face
    directory, or `random:` and the name of a shape, for measurements without a model."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of weights and KV cache.  float32 is exact, and on a CPU no slower than bfloat16; a GPU is
    several times faster with either of the others."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """`[pool]`: the KV pool that prefilld owns and decoded maps."""

    num_blocks: NumBlocks = 0
    """All of its memory is taken at the start.  0: on a CPU 1,024, which the embedded model's two
    longest prompts fill (755 MB in float32); on a GPU what `prefilld.memory_fraction` gives."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens a block.  Half a block a sequence is wasted; a block is one piece to transfer."""
    prefix_cache: bool = True
    """Keep the blocks of prompts that ended while nobody needs the room, for prompts that begin
    alike.  Answers tell how much was found: whoever asks learns whether somebody asked alike."""
    access: Literal["auto", "pull", "direct"] = "auto"
    """How decoded uses the blocks: `pull` copies them into its own pool, `direct` reads them where
    they are; `auto` is direct on one GPU and pull anywhere else."""
    backend: Literal["auto", "memfd", "cuda"] = "auto"
    """What the pool is made of: shared memory, or a GPU's by CUDA IPC; `auto` follows the
    devices."""


class PrefilldConfig(Section, frozen=True, kw_only=True):
    """`[prefilld]`: the daemon that turns prompts into KV cache."""

    socket: Text
    """Path of the socket for clients; README.md says where it lies by default."""
    group: Text | None = None
    """Group whose members may connect as well.  A folder that is missing is made for it, 0750."""
    device: Device = "cpu"
    """Where prompts are computed, and where the pool lies."""
    memory_fraction: MemoryFraction = 0.0
    """Share of the GPU's memory that a pool of `num_blocks = 0` takes: of what is free beside the
    weights and what steps need. 0: 0.85, or half of that where both daemons name one GPU."""
    token_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """Prompt tokens a step.  Fewer let short prompts pass long ones, and leave less to hand over
    when the last are computed; more waste less on steps.  0: 512 on a CPU, 2,048 on a GPU."""
    lone_budget: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0
    """The same while one prompt has prefilld to itself, but for the last of it.  More compute a
    long prompt faster; whoever comes meanwhile waits for up to two such steps.  Less than
    `token_budget` counts as that.  0: `token_budget` on a CPU, twice as much on a GPU."""
    attention: Literal["auto", "torch", "flash-attn-4"] = "auto"
    """Whose kernels compute attention of long prompts on a GPU: those that come with torch, or a
    library's.  `auto` tries what is installed at the start and takes the fastest."""
    max_waiting: Annotated[int, Meta(ge=1, le=1 << 20)] = 128
    """Requests that may queue before new ones are told `busy`."""
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 8
    """Prompts in prefill at once: each holds blocks while it shares the token budget."""
    threads: Threads = 0
    """Compute threads.  0 takes half the cores, since the pair shares the machine."""
    metrics: Text | None = None
    """Tell metrics over HTTP as well: `127.0.0.1:9464`, or the path of a Unix socket."""


class DecodedConfig(Section, frozen=True, kw_only=True):
    """`[decoded]`: the daemon that turns KV cache into answers."""

    socket: Text
    """Path of the socket for prefilld's link and for STATUS; by default beside the other one."""
    group: Text | None = None
    """As for prefilld, since `kvpair status` asks both sockets."""
    device: Device = "cpu"
    """Where answers are computed."""
    memory_fraction: MemoryFraction = 0.0
    """As for prefilld, of decoded's own pool."""
    num_blocks: NumBlocks = 0
    """Of decoded's own pool, into which blocks are pulled; on a CPU its memory is taken as it is
    written.  0: what it means for prefilld's pool, whatever size that one is given."""
    max_batch: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Sequences a step.  0: 32 on a CPU, 128 on a GPU."""
    swap_gib: Annotated[float, Meta(ge=0.0, le=65_536.0)] = 4.0
    """Host memory, in GiB, for answers that make room for older ones when the pool is full; never
    more than the pool, nor than half of the memory that is free.  On a GPU it is taken at the
    start, on a CPU as it is written.  0: such answers break off, and clients ask for the rest."""
    threads: Threads = 0
    """Compute threads, as for prefilld."""
    metrics: Text | None = None
    """As for prefilld, at an address of its own: `127.0.0.1:9465`."""
    link_uid: Annotated[int, Meta(ge=0, le=(1 << 32) - 2)] | None = None
    """A user, beside root and decoded's own, whose prefilld may open the link; not on GPUs, where
    CUDA wants one user for both."""


class LimitsConfig(Section, frozen=True, kw_only=True):
    """`[limits]`: what one client may ask for, and how long anything may take."""

    max_request_bytes: Annotated[int, Meta(ge=1024, le=MAX_REQUEST_BYTES)] = (
        DEFAULT_MAX_REQUEST_BYTES
    )
    """Largest frame from a client, in bytes; `protocol.limits` has the reason."""
    drain_timeout_s: Seconds = 30.0
    """How long a daemon that was told to stop goes on serving what it has begun."""
    client_stall_timeout_s: PositiveSeconds = 60.0
    """A client that takes no byte for so long is cancelled: it holds blocks others wait for."""
    request_timeout_s: PositiveSeconds = 300.0
    """How long a request may wait for its first token before it is told `timeout`."""
    max_tokens_default: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 512
    """Length of answers whose request names none."""


class LinkConfig(Section, frozen=True, kw_only=True):
    """`[link]`: the connection between the daemons."""

    ping_interval_s: PositiveSeconds = 1.0
    """Silence after which the peer is asked whether it lives."""
    ping_timeout_s: PositiveSeconds = 10.0
    """Silence after which it is held for dead; above any pause of a busy event loop."""
    handshake_timeout_s: PositiveSeconds = 30.0
    """For the whole hand-shake, in which decoded maps the pool and reads it three times."""
    quarantine_s: Seconds = 10.0
    """How long blocks of a peer that is not proved gone stay out of use."""
    min_bandwidth_gb_s: Annotated[float, Meta(ge=0.0, le=100_000.0)] | None = None
    """Slowest mapping that is taken, in 10^9 bytes a second.  By default 40 within a GPU and over
    NVLink, 5 over PCIe, 0 in shared memory, which has one kind of path."""


class LogConfig(Section, frozen=True, kw_only=True):
    """`[log]`: what is told on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console on a terminal, JSON lines anywhere else."""
    prompts: bool = False
    """Log prompts and answers.  Off: they are the users' and may be secret."""


class TraceConfig(Section, frozen=True, kw_only=True):
    """`[trace]`: spans of single requests, for OpenTelemetry."""

    endpoint: Text | None = None
    """Collector to send them to, as `http://127.0.0.1:4318/v1/traces`.  Needs the extra `otel`."""


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration.  `shared.config.resolve` makes it."""

    prefilld: PrefilldConfig
    decoded: DecodedConfig
    model: ModelConfig = ModelConfig()
    pool: PoolConfig = PoolConfig()
    limits: LimitsConfig = LimitsConfig()
    link: LinkConfig = LinkConfig()
    log: LogConfig = LogConfig()
    trace: TraceConfig = TraceConfig()


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "pool": PoolConfig,
    "prefilld": PrefilldConfig,
    "decoded": DecodedConfig,
    "limits": LimitsConfig,
    "link": LinkConfig,
    "log": LogConfig,
    "trace": TraceConfig,
}
"""The file's tables, in the order in which they are shown."""

REFUSED: dict[tuple[str, object], str] = {
    (f"{section}.num_blocks", 1): "block 0 is reserved, so a pool of one could hold nothing"
    for section in ("pool", "decoded")
}
"""Values within a key's range that cannot work, and why."""
