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
NumBlocks = Annotated[int, Meta(ge=2, le=1 << 31)]
"""Block 0 is reserved, so a pool of one block could hold nothing."""
Threads = Annotated[int, Meta(ge=0, le=1024)]
Text = Annotated[str, Meta(min_length=1)]


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the file."""


class ModelConfig(Section, frozen=True, kw_only=True):
    """`[model]`: what is served."""

    path: Text = "smollm2-135m-instruct"
    """A name that `kvpair model list` knows, or the path of a model file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and KV cache.  float32 is exact, and on a CPU no slower than bfloat16."""


class PoolConfig(Section, frozen=True, kw_only=True):
    """`[pool]`: the KV pool that prefilld owns and decoded maps."""

    num_blocks: NumBlocks = 1024
    """16,384 tokens: two of the embedded model's longest prompts, 755 MB in float32, all of it
    taken at the start."""
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Tokens a block.  Half a block a sequence is wasted; a block is one piece to transfer."""
    access: Literal["auto", "pull"] = "auto"
    """How decoded uses the blocks: `pull` copies them into its own pool; `auto` chooses."""
    backend: Literal["auto", "memfd"] = "auto"
    """What the pool is made of; `auto` follows the devices."""


class PrefilldConfig(Section, frozen=True, kw_only=True):
    """`[prefilld]`: the daemon that turns prompts into KV cache."""

    socket: Text
    """Path of the socket for clients; README.md says where it lies by default."""
    group: Text | None = None
    """Group whose members may connect as well.  A folder that is missing is made for it, 0750."""
    device: Literal["cpu"] = "cpu"
    """Where prompts are computed."""
    token_budget: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 512
    """Prompt tokens a step.  Fewer let short prompts pass long ones, more waste less on steps."""
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
    device: Literal["cpu"] = "cpu"
    """Where answers are computed."""
    num_blocks: NumBlocks = 1024
    """Of decoded's own pool, into which blocks are pulled; its memory is taken as it is written."""
    max_batch: Annotated[int, Meta(ge=1, le=4096)] = 32
    """Sequences a step.  The pool holds about 25 of the default length at once."""
    threads: Threads = 0
    """Compute threads, as for prefilld."""
    metrics: Text | None = None
    """As for prefilld, at an address of its own: `127.0.0.1:9465`."""
    link_uid: Annotated[int, Meta(ge=0, le=(1 << 32) - 2)] | None = None
    """A user, beside root and decoded's own, whose prefilld may open the link."""


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
    """Length of answers whose request names none.  decoded reserves room for all of it."""


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
    min_bandwidth_gb_s: Annotated[float, Meta(ge=0.0, le=100_000.0)] = 0.0
    """Slowest mapping that is taken, in 10^9 bytes a second.  0: a memfd has one kind of path."""


class LogConfig(Section, frozen=True, kw_only=True):
    """`[log]`: what is told on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest that is logged."""
    format: Literal["auto", "json", "console"] = "auto"
    """`auto`: console on a terminal, JSON lines anywhere else."""
    prompts: bool = False
    """Log prompts and answers.  Off: they are the users' and may be secret."""


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration.  `shared.config.resolve` makes it."""

    prefilld: PrefilldConfig
    decoded: DecodedConfig
    model: ModelConfig = ModelConfig()
    pool: PoolConfig = PoolConfig()
    limits: LimitsConfig = LimitsConfig()
    link: LinkConfig = LinkConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, type[Section]] = {
    "model": ModelConfig,
    "pool": PoolConfig,
    "prefilld": PrefilldConfig,
    "decoded": DecodedConfig,
    "limits": LimitsConfig,
    "link": LinkConfig,
    "log": LogConfig,
}
"""The file's tables, in the order in which they are shown."""

NOT_YET: dict[tuple[str, str], str] = {
    ("pool.access", "direct"): "reading blocks in place needs both daemons on one GPU",
    ("pool.backend", "cuda"): "this version keeps its pool in a memfd",
    ("prefilld.device", "cuda"): "this version computes on the CPU",
    ("decoded.device", "cuda"): "this version computes on the CPU",
}
"""Values that users will try, and why this version refuses them."""
