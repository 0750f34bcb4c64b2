"""What prefilld and decoded say to each other: a hand-shake, then the blocks of each request."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, field

from protocol import limits
from protocol.client_messages import Sampling, TokenLogprob
from protocol.fields import (
    BlockIds,
    Count,
    Epoch,
    Generation,
    LeaseId,
    Message,
    Nanoseconds,
    NumLogprobs,
    Part,
    RequestId,
    ShortText,
    Slot,
    StopString,
    TokenId,
    TokenIds,
)

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
    driver: Annotated[str, Meta(max_length=64)] = ""
    """The newest CUDA that prefilld's driver speaks; told where the pool does not map."""
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
    the wire can never promise the same room twice.  Answers take blocks meanwhile: a HANDOFF that
    comes when they are gone is rejected with `no-room`, and sent again later.
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
    event_handles: Annotated[list[Annotated[bytes, Meta(max_length=64)]], Meta(max_length=4096)] = (
        field(default_factory=list)
    )


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


class FirstStep(Part, frozen=True, kw_only=True):
    """What decoded's first step needs beside the first token, which the control page tells.

    Only where nothing else matters to it: no penalty, no bias, no log-probabilities.
    """

    num_tokens: Count
    """Of the prompt and the resumed answer; the first token's position."""
    sampling: Sampling
    """With the seed resolved."""


class Chunk(LeaseMessage, tag="chunk", frozen=True, kw_only=True):
    """These blocks of a running prefill are written, or will be once `event` is seen."""

    slot: Slot
    generation: Generation
    first: Count
    """Index in the prompt's block table of the first block named here."""
    blocks: BlockIds
    total_blocks: Count
    """Blocks for which decoded must have room: the prompt's, and one for the next token where they
    are full.  For what the answer needs beyond it takes others by itself, one at a time."""
    event: Slot | None = None
    """Slot in the event ring; None where the blocks are written already."""
    first_step: FirstStep | None = None
    """With the last blocks of a prompt: decoded may begin before HANDOFF comes."""


class RequestState(Part, frozen=True, kw_only=True):
    """What decoded must know to go on where prefilld stopped."""

    id: RequestId
    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens whose KV was found in the prefix cache."""
    ids: TokenIds
    """The answer so far, the token that prefilld just sampled last."""
    delivered: Count
    """How many of `ids` the client has."""
    resumed: Count
    """How many of `ids` came with `resume`."""
    max_tokens: Count
    min_tokens: Count = 0
    sampling: Sampling
    """With the seed resolved."""
    prompt_set: Annotated[bytes, Meta(max_length=limits.MAX_TOKEN_BITMAP_BYTES)] = b""
    """Which tokens the prompt has, bit `id % 8` of byte `id // 8`; empty unless repetition is
    penalised."""
    logprobs: NumLogprobs | None = None
    held_logprobs: Annotated[list[TokenLogprob], Meta(max_length=limits.MAX_LOGPROBS_PER_FRAME)] = (
        field(default_factory=list)
    )
    """Of the ids that the client does not have, where the request asked."""
    stop: list[StopString]
    stop_ids: list[TokenId]
    """With the model's own end tokens, unless they are to be ignored."""
    stream: bool
    arrived_ns: Nanoseconds
    started_ns: Nanoseconds
    first_token_ns: Nanoseconds
    prefill_device_ns: Count | None = None
    """How long the steps that computed the prompt took the GPU; None on a CPU."""


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
    """Room came free at decoded, or is gone, while nothing else was due to say so."""

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
    """decoded is shutting down: reserve nothing more; what is reserved or adopted will finish."""


class Bye(Message, tag="bye", frozen=True, kw_only=True):
    """The sender closes the link on purpose."""
