"""Every message as a typed struct: its fields, their ranges, and who may send it to whom.

A message is one msgpack map whose `type` names its struct.  Unknown types, unknown fields,
wrong types and values out of range are refused as a whole; nothing is coerced.  The
five unions at the end say which messages may arrive on which connection.  `README.md` beside
this file lists them all and is generated from these structs.
"""

from __future__ import annotations

import math
from typing import Annotated, get_args

from msgspec import Meta, Struct

from protocol import limits

type_field = "type"

# --- field types -----------------------------------------------------------------------

Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 62))]
"""A reading of CLOCK_MONOTONIC in nanoseconds; both daemons share that clock."""
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e15)]
TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=limits.MAX_TOKENS)]
BlockId = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
"""An index into the pool.  Block 0 is reserved for the proof at hand-shake."""
BlockIds = Annotated[list[BlockId], Meta(max_length=limits.MAX_BLOCKS)]
Epoch = Annotated[bytes, Meta(min_length=limits.EPOCH_BYTES, max_length=limits.EPOCH_BYTES)]
LeaseId = Annotated[int, Meta(ge=1, le=(1 << 62))]
Generation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Slot = Annotated[int, Meta(ge=0, lt=limits.MAX_CONTROL_SLOTS)]
Seed = Annotated[int, Meta(ge=0, le=limits.MAX_SEED)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
ShortText = Annotated[str, Meta(max_length=4096)]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_STRING_CHARACTERS)]


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field=type_field):
    """What every message is: immutable, closed to unknown fields, named by its `type`."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct inside a message; it has no `type` of its own."""


# --- what a request is made of -----------------------------------------------------------


class ChatMessage(Part, frozen=True, kw_only=True):
    """One turn of a conversation, rendered by the model's chat template."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str


class Sampling(Part, frozen=True, kw_only=True):
    """How the next token is chosen.  Temperature 0 is greedy, and then the rest is ignored."""

    temperature: Annotated[float, Meta(ge=0.0, le=limits.MAX_TEMPERATURE)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_K)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach p; 1 keeps all."""
    seed: Seed | None = None
    """None lets prefilld draw one; ACCEPTED tells which."""


class Resume(Part, frozen=True, kw_only=True):
    """What a client already has of an answer that was cut off."""

    attempt: Annotated[int, Meta(ge=1, le=100)]
    seed: Seed
    fingerprint: Annotated[str, Meta(min_length=1, max_length=128)]
    """The model fingerprint that ACCEPTED gave; another model is `model-changed`."""
    ids: TokenIds
    """The tokens delivered so far; the answer goes on behind them."""


# --- client -> prefilld ------------------------------------------------------------------


class _Request(Message, frozen=True, kw_only=True):
    """What GENERATE and CHECK share."""

    prompt: str | list[ChatMessage | TokenId]
    """Text, chat messages, or token ids (then no template and no special token is added)."""
    id: RequestId | None = None
    """Ties the request's log lines together; None lets prefilld draw one."""
    raw: bool = False
    """Take text as it is, without the chat template."""
    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS)] | None = None
    """None takes what is left of the model's context, or the daemon's default."""
    sampling: Sampling = Sampling()
    stop: Annotated[list[StopString], Meta(max_length=limits.MAX_STOP_STRINGS)] = []
    """The answer ends before the first of these; it is not part of the text."""
    stop_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_IDS)] = []
    """The answer ends with the first of these ids, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""
    stream: bool = True
    """False: one TOKENS frame with the whole answer, right before END."""
    resume: Resume | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what single fields cannot say."""
        if isinstance(self.prompt, list):
            if not self.prompt:
                raise ValueError("`prompt` is an empty list")
            kinds = {type(item) for item in self.prompt}
            if len(kinds) > 1:
                raise ValueError("`prompt` mixes chat messages and token ids")
            if kinds == {ChatMessage} and len(self.prompt) > limits.MAX_MESSAGES:
                raise ValueError(f"`prompt` has more than {limits.MAX_MESSAGES} chat messages")


class Generate(_Request, tag="generate", frozen=True, kw_only=True):
    """Answer a prompt.  One connection carries one of these."""


class Check(_Request, tag="check", frozen=True, kw_only=True):
    """Judge a request without running it; CHECKED answers."""


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """End the running answer; END with reason `cancelled` follows."""


class StatusRequest(Message, tag="status-request", frozen=True, kw_only=True):
    """Ask for STATUS."""


class MetricsRequest(Message, tag="metrics-request", frozen=True, kw_only=True):
    """Ask for METRICS."""


# --- daemon -> client --------------------------------------------------------------------


class Accepted(Message, tag="accepted", frozen=True, kw_only=True):
    """The request passed every check and waits for its turn."""

    id: RequestId
    seed: Seed
    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens whose KV was found in the prefix cache."""
    fingerprint: str


class Tokens(Message, tag="tokens", frozen=True, kw_only=True):
    """A run of the answer.  Ids leave only together with their whole text."""

    index: Count
    """Index in the answer of the first id."""
    ids: TokenIds
    text: str
    choice: Count = 0


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a finished request."""

    prompt_tokens: Count
    cached_tokens: Count
    completion_tokens: Count


class HandoffTimings(Part, frozen=True, kw_only=True):
    """When each stage of the hand-off was reached, in ms since prefilld knew the first token."""

    ready: Milliseconds
    """HANDOFF was given to the kernel."""
    adopted: Milliseconds
    """decoded owned the stream."""
    copy_start: Milliseconds
    """decoded began to copy the first block; 0 where it had begun while prefill still ran."""
    copy_done: Milliseconds
    """The last block was in decoded's own pool."""
    first_step: Milliseconds
    """decoded knew the second token."""


class Timings(Part, frozen=True, kw_only=True):
    """Where a request's time went, in ms."""

    queue: Milliseconds
    """From the request's arrival to its first chunk."""
    prefill: Milliseconds
    """From its first chunk to its first token."""
    decode: Milliseconds
    """From its first token to its last."""
    total: Milliseconds
    """From its arrival to END."""
    handoff: HandoffTimings | None = None
    """None where the first token ended the answer, so nothing was handed over."""


class End(Message, tag="end", frozen=True, kw_only=True):
    """The last message of an answer."""

    reason: Annotated[str, Meta(pattern=r"^(stop|length|cancelled)\Z")]
    usage: Usage
    timings_ms: Timings


class Error(Message, tag="error", frozen=True, kw_only=True):
    """The last message of a request that failed; `errors.py` lists the codes."""

    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: str
    retryable: bool
    retry_after_ms: Count = 0


class Checked(Message, tag="checked", frozen=True, kw_only=True):
    """The answer to CHECK."""

    prompt_tokens: Count
    max_tokens: Count
    blocks: Count
    """Blocks of prefilld's pool that the prompt needs."""
    total_blocks: Count
    """Blocks of decoded's pool that prompt and answer need."""
    fits: bool


class Status(Message, tag="status", frozen=True, kw_only=True):
    """A daemon's state as a tree of plain values; the packages' READMEs list the keys."""

    status: dict[str, object]
    """Nested maps with string keys, lists, strings, finite numbers, booleans and nil."""

    def __post_init__(self) -> None:
        """Raise ValueError for what is not plain, or nested too deep."""
        _check_plain(self.status, "status", limits.MAX_STATUS_DEPTH)


def _check_plain(value: object, path: str, depth_left: int) -> None:
    if depth_left == 0:
        raise ValueError(f"`{path}` is nested more than {limits.MAX_STATUS_DEPTH} deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"`{path}` has a key that is not a string")  # noqa: TRY004 - msgspec reports ValueErrors
            _check_plain(inner, f"{path}.{key}", depth_left - 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{path}[{index}]", depth_left - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"`{path}` is not finite")
    elif value is not None and not isinstance(value, str | int):
        raise ValueError(f"`{path}` is of type {type(value).__name__}")


class Metrics(Message, tag="metrics", frozen=True, kw_only=True):
    """A daemon's metrics as Prometheus text."""

    text: str


# --- the link: hand-shake ----------------------------------------------------------------


class Instance(Part, frozen=True, kw_only=True):
    """Which process speaks, told so that another one can never be mistaken for it."""

    boot_id: Annotated[str, Meta(max_length=64)]
    pid: Count
    """As the process sees itself: equal values on both sides break CUDA IPC."""
    start_time: Count
    """Field 22 of /proc/PID/stat, in clock ticks: tells a process from a later one of that pid."""
    pid_namespace: Count
    """Inode of /proc/self/ns/pid."""
    shm_device: Count
    """st_dev of /dev/shm: CUDA events cross processes through it."""


class Hello(Message, tag="hello", frozen=True, kw_only=True):
    """prefilld's first message on a link."""

    version: Count
    instance: Instance
    epoch: Epoch
    backend: Annotated[str, Meta(max_length=32)]
    """`memfd` or `cuda`."""
    device: Annotated[str, Meta(max_length=64)]
    """The GPU's UUID, or `cpu`."""
    fingerprint: Annotated[str, Meta(max_length=128)]
    """Hash over `fields`."""
    fields: Annotated[dict[str, str | int | float | bool], Meta(max_length=64)]
    """Everything the fingerprint is made of, so that a mismatch can be named."""

    def __post_init__(self) -> None:
        """Raise ValueError for a field that does not even equal itself."""
        for name, value in self.fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`fields.{name}` is not finite")


class Credits(Part, frozen=True, kw_only=True):
    """What decoded can still take, absolutely, as of the reservations it has `seen`.

    prefilld subtracts what it has reserved since; so a frame that crossed one of ours on
    the wire can never promise the same room twice.
    """

    free_blocks: Count
    free_sequences: Count
    queue_depth: Count
    """Adopted sequences that have not taken their first step."""
    seen: Count
    """First CHUNKs of a lease, and HANDOFFs, read on this link: the room above counts them in."""


class Welcome(Message, tag="welcome", frozen=True, kw_only=True):
    """decoded takes the link."""

    instance: Instance
    access: Annotated[str, Meta(pattern=r"^(pull|direct)\Z")]
    held: Annotated[list[LeaseId], Meta(max_length=limits.MAX_CONTROL_SLOTS)]
    """Leases of this epoch that decoded still reads; every other one has ended."""
    pool_blocks: Count
    """Blocks of decoded's own pool that sequences may have; a larger request can never fit."""
    credits: Credits


class Refuse(Message, tag="refuse", frozen=True, kw_only=True):
    """The link is not taken; `errors.py` lists the codes."""

    code: Annotated[str, Meta(max_length=64)]
    field: Annotated[str, Meta(max_length=64)]
    ours: ShortText
    theirs: ShortText
    message: ShortText
    """What to do about it."""


class Map(Message, tag="map", frozen=True, kw_only=True):
    """How to map the pool.  On the memfd its descriptors ride along: pool, control page."""

    pool_bytes: Count
    offset: Count
    num_blocks: Count
    control_slots: Annotated[int, Meta(ge=1, le=limits.MAX_CONTROL_SLOTS)]
    proof_bytes: Annotated[int, Meta(ge=16, le=(1 << 31))]
    """Leading bytes of block 0 that hold a random pattern."""
    pool_handle: Annotated[bytes, Meta(max_length=64)] = b""
    """CUDA IPC only.  A capability: never logged."""
    event_handles: Annotated[
        list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=4096)
    ] = []


class Mapped(Message, tag="mapped", frozen=True, kw_only=True):
    """decoded mapped the pool and read the proof through the mapping."""

    digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 of the pattern as decoded read it."""
    bandwidth_gb_s: Annotated[float, Meta(ge=0.0, le=1e6)]
    """Best of three readings through the mapping, in 10^9 bytes a second."""
    credits: Credits


# --- the link: a request's blocks ----------------------------------------------------------


class LeaseMessage(Message, frozen=True, kw_only=True):
    """A message about one lease; one that names another epoch is refused."""

    epoch: Epoch
    lease: LeaseId


class Chunk(LeaseMessage, tag="chunk", frozen=True, kw_only=True):
    """These blocks of a running prefill are written, or will be once `event` is seen."""

    slot: Slot
    generation: Generation
    first: Count
    """Index in the prompt's block table of the first block named here."""
    blocks: BlockIds
    total_blocks: Count
    """Blocks for which decoded must have room: prompt and answer."""
    event: Slot | None = None
    """Slot in the event ring; None where the blocks are written already."""


class RequestState(Part, frozen=True, kw_only=True):
    """What decoded must know to go on where prefilld stopped."""

    id: RequestId
    prompt_tokens: Count
    cached_tokens: Count
    ids: TokenIds
    """The answer so far, the token that prefilld just sampled last."""
    delivered: Count
    """How many of `ids` the client has."""
    resumed: Count
    """How many of `ids` came with `resume`."""
    max_tokens: Count
    sampling: Sampling
    """With the seed resolved."""
    stop: list[StopString]
    stop_ids: list[TokenId]
    """With the model's own end tokens, unless they are to be ignored."""
    stream: bool
    arrived_ns: Nanoseconds
    started_ns: Nanoseconds
    first_token_ns: Nanoseconds


class Handoff(LeaseMessage, tag="handoff", frozen=True, kw_only=True):
    """The request is decoded's now; the client's connection rides on this frame's first byte."""

    slot: Slot
    generation: Generation
    blocks: BlockIds
    """The whole prompt's block table."""
    num_tokens: Count
    """Tokens whose KV those blocks hold."""
    total_blocks: Count
    request: RequestState
    residue: Annotated[bytes, Meta(max_length=limits.MAX_RESIDUE_BYTES)] = b""
    """Client bytes that were read but not parsed."""
    sent_ns: Nanoseconds


class Abort(LeaseMessage, tag="abort", frozen=True, kw_only=True):
    """prefilld takes the lease back; exactly one RELEASE answers, after any copy in flight."""


class _Answer(LeaseMessage, frozen=True, kw_only=True):
    """A message about one lease from decoded."""

    credits: Credits


class NoChunk(_Answer, tag="nochunk", frozen=True, kw_only=True):
    """There is no room to reserve now; the lease's blocks are taken at HANDOFF instead."""


class Adopt(_Answer, tag="adopt", frozen=True, kw_only=True):
    """decoded owns the stream and the descriptor."""


class Reject(_Answer, tag="reject", frozen=True, kw_only=True):
    """decoded did not take the HANDOFF; implies RELEASE."""

    code: Annotated[str, Meta(max_length=64)]
    message: ShortText


class Release(_Answer, tag="release", frozen=True, kw_only=True):
    """decoded will not read the lease's blocks again."""


class CreditUpdate(Message, tag="credit", frozen=True, kw_only=True):
    """Room came free at decoded while nothing else was due to say so."""

    credits: Credits


class Ping(Message, tag="ping", frozen=True, kw_only=True):
    """Are you there?  PONG answers."""

    sent_ns: Nanoseconds


class Pong(Message, tag="pong", frozen=True, kw_only=True):
    """The answer to PING, with its `sent_ns`."""

    sent_ns: Nanoseconds
    credits: Credits | None = None
    """From decoded only."""


class Drain(Message, tag="drain", frozen=True, kw_only=True):
    """decoded is shutting down: send no new CHUNK or HANDOFF, what is adopted will finish."""


class Bye(Message, tag="bye", frozen=True, kw_only=True):
    """The sender closes the link on purpose."""


# --- which messages may arrive where -------------------------------------------------------

ToPrefilld = Generate | Check | Cancel | StatusRequest | MetricsRequest
"""What prefilld accepts from a client."""

ToDecoded = Cancel | StatusRequest | MetricsRequest
"""What decoded accepts from a client; CANCEL only on a connection that was handed over."""

FromDaemon = Accepted | Tokens | End | Error | Checked | Status | Metrics
"""What a client accepts from either daemon."""

LinkToDecoded = Hello | Map | Chunk | Handoff | Abort | Ping | Pong | Refuse | Bye
"""What decoded accepts on the link."""

LinkToPrefilld = (
    Welcome
    | Refuse
    | Mapped
    | NoChunk
    | Adopt
    | Reject
    | Release
    | CreditUpdate
    | Ping
    | Pong
    | Drain
    | Bye
)
"""What prefilld accepts on the link."""

MESSAGE_TYPES: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for union in (ToPrefilld, ToDecoded, FromDaemon, LinkToDecoded, LinkToPrefilld)
    for kind in get_args(union)
}
"""Every message by its `type`."""


def num_descriptors(message: Message) -> int:
    """Return how many descriptors ride on this message's frame.

    HANDOFF carries the client's connection; MAP the control page, and before it the pool where
    the pool is a memfd and not a CUDA handle.
    """
    if isinstance(message, Handoff):
        return 1
    if isinstance(message, Map):
        return 1 if message.pool_handle else 2
    return 0
