"""What decoded's book of leases asks its caller to do, as values; see `intake.py` for when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from decoded.early_step import EarlyStep

R = TypeVar("R")
"""What the caller keeps of a request; the book only carries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """A bounded run of one lease's blocks to copy: `sources[i]` into `targets[i]`."""

    lease_id: int
    slot: int
    generation: int
    sources: list[int]
    targets: list[int]
    event: int | None = None
    """Slot in the event ring that must be seen before the sources are read; None where they are
    written already."""
    early: EarlyStep | None = None
    """What may be computed as soon as these blocks, the prompt's last, are copied."""
    is_to_arena: bool = False
    """The targets are places in the arena, and not blocks of our pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTimes:
    """When a copy ran."""

    start_ns: int = 0
    """When it began, on CLOCK_MONOTONIC."""
    done_ns: int = 0
    """When it was seen to be over."""
    device_ns: int | None = None
    """How long it took the GPU, by its clock; None where no GPU copied."""


UNTIMED = CopyTimes()
"""Of a copy whose times matter to nobody: it never ran."""


@dataclass(frozen=True, slots=True)
class SendNoChunk:
    """Answer NOCHUNK."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class SendAdopt(Generic[R]):
    """Answer ADOPT; from here the request's stream is ours."""

    lease_id: int
    request: R


@dataclass(frozen=True, slots=True)
class SendReject(Generic[R]):
    """Answer REJECT with `code`; the request stays prefilld's."""

    lease_id: int
    code: str
    message: str
    request: R


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Answer RELEASE: the lease's blocks will not be read again."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class Unreserve:
    """Give the target blocks and the place in the batch back to the scheduler."""

    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Pulled(Generic[R]):
    """All of the prompt can be read: start the sequence."""

    request: R
    blocks: list[int]
    """Our own, for the rest of the sequence where its beginning is read in place."""
    copy_start_ns: int = 0
    copy_done_ns: int = 0
    """When the first copy began and the last one ended, as `copied` was told."""
    in_place: list[int] = field(default_factory=list)
    """The peer's blocks that hold the beginning, and that the lease lasts for."""
    early: EarlyStep | None = None
    """The sequence's first step, where it was launched already."""
    device_ns: int | None = None
    """How long all copies took the GPU, in sum; None where no GPU copied."""
    last_device_ns: int | None = None
    """How long the last one did."""


@dataclass(frozen=True, slots=True)
class Lost(Generic[R]):
    """What came of the prompt cannot be believed: the request ends with `prefill-lost`."""

    request: R
    reason: str = "the prompt's blocks were revoked"


@dataclass(frozen=True, slots=True)
class Ignored:
    """A late, doubled or unknown message: count it."""

    kind: str
    lease_id: int


Effect = (
    SendNoChunk
    | SendAdopt[R]
    | SendReject[R]
    | SendRelease
    | Unreserve
    | Pulled[R]
    | Lost[R]
    | Ignored
)
