"""The life of a lease as data: its states, what can happen to it, and what follows from that.

    OPEN ───▶ CHUNKED ───▶ SENT ───▶ ADOPTED ───▶ ENDED          what goes well
               DECLINED ──▶┘
    CHUNKED, DECLINED, ADOPTED ──abort──▶ ABORTING ──release──▶ ENDED
    SENT ──abort──▶ RECALLED ──adopt──▶ ABORTING
    ADOPTED, RECALLED, ABORTING ──link lost, peer in doubt──▶ QUARANTINED ──▶ ENDED

`TRANSITIONS` is the whole truth; what is not in it does not happen.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class LeaseState(enum.Enum):
    """How far a lease has come."""

    OPEN = "open"
    """The peer has not heard of it."""
    CHUNKED = "chunked"
    """A CHUNK named it: the peer may be pulling while prefill goes on."""
    DECLINED = "declined"
    """The peer had no room to reserve: no more chunks, the blocks are taken at hand-off."""
    SENT = "sent"
    """HANDOFF left; ADOPT or REJECT will answer."""
    ADOPTED = "adopted"
    """The request is the peer's; RELEASE will give the blocks back."""
    RECALLED = "recalled"
    """ABORT followed a HANDOFF whose answer is not known; RELEASE will answer."""
    ABORTING = "aborting"
    """ABORT left; RELEASE will answer."""
    QUARANTINED = "quarantined"
    """Revoked, but the peer is not known to have stopped reading."""
    ENDED = "ended"
    """Gone; the table forgets it at once."""


class LeaseEvent(enum.Enum):
    """What can happen to a lease."""

    CHUNK_SENT = "chunk-sent"
    HANDOFF_SENT = "handoff-sent"
    ABORT = "abort"
    NOCHUNK = "nochunk"
    ADOPT = "adopt"
    REJECT = "reject"
    RELEASE = "release"
    LINK_LOST = "link-lost"
    """The link is gone and the peer may live on."""
    PEER_GONE = "peer-gone"
    """The link is gone and so is the peer: it reads nothing any more."""
    HELD = "held"
    """A new link is up, and the peer says that it still holds the lease."""
    NOT_HELD = "not-held"
    """A new link is up, and the peer does not say so."""
    EXPIRED = "expired"
    """The time of grace is over."""


class Outcome(enum.Enum):
    """What a transition does beside changing the state; each becomes effects."""

    NOTHING = "nothing"
    CLOSE_CLIENT = "close-client"
    SEND_ABORT = "send-abort"
    FREE = "free"
    """Revoke if that was not done before, then free."""
    RETURN = "return"
    """Revoke, then give the request back."""
    QUARANTINE = "quarantine"
    """Revoke, then keep the blocks away from everybody."""


class ReturnReason(enum.Enum):
    """Why a request came back before the peer adopted it."""

    REJECTED = "rejected"
    LINK_LOST = "link-lost"


@dataclass(frozen=True, slots=True)
class PublishGeneration:
    """Make the control page's slot hold this generation, before anything that follows."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """The lease ended and its request with it: nobody has the blocks by it any more.

    They are free, but for those that another request shares or the prefix cache keeps.
    """

    lease_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Keep the blocks from being written until `FreeBlocks` follows."""

    lease_id: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Tell the peer ABORT."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class CloseClient:
    """The peer owns the client's connection: close this side's duplicate, write nothing to it."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """The lease ended, but the request and its blocks are still this daemon's.

    It is to be handed to the next decoded under a new lease.
    """

    lease_id: int
    request_id: str
    reason: ReturnReason


@dataclass(frozen=True, slots=True)
class Ignored:
    """Something late, doubled, unknown or out of order; count it and do nothing."""

    kind: LeaseEvent
    lease_id: int


Effect = (
    PublishGeneration | FreeBlocks | Quarantine | SendAbort | CloseClient | ReturnRequest | Ignored
)
"""What the caller must do, in the order in which it is returned."""


class Edge(NamedTuple):
    """Where an event leads, and what it does on the way."""

    to: LeaseState
    outcome: Outcome = Outcome.NOTHING


_S, _E, _O = LeaseState, LeaseEvent, Outcome
_FREED = Edge(_S.ENDED, _O.FREE)
_RETURNED = Edge(_S.ENDED, _O.RETURN)
_QUARANTINED = Edge(_S.QUARANTINED, _O.QUARANTINE)
_ABORTED = Edge(_S.ABORTING, _O.SEND_ABORT)

TRANSITIONS: Mapping[LeaseState, Mapping[LeaseEvent, Edge]] = MappingProxyType(
    {
        _S.OPEN: {
            _E.CHUNK_SENT: Edge(_S.CHUNKED),
            _E.HANDOFF_SENT: Edge(_S.SENT),
            _E.ABORT: _FREED,
            _E.LINK_LOST: _RETURNED,
            _E.PEER_GONE: _RETURNED,
        },
        _S.CHUNKED: {
            _E.CHUNK_SENT: Edge(_S.CHUNKED),
            _E.HANDOFF_SENT: Edge(_S.SENT),
            _E.NOCHUNK: Edge(_S.DECLINED),
            _E.ABORT: _ABORTED,
            _E.LINK_LOST: _RETURNED,
            _E.PEER_GONE: _RETURNED,
        },
        _S.DECLINED: {
            _E.HANDOFF_SENT: Edge(_S.SENT),
            _E.ABORT: _ABORTED,
            _E.LINK_LOST: _RETURNED,
            _E.PEER_GONE: _RETURNED,
        },
        _S.SENT: {
            _E.NOCHUNK: Edge(_S.SENT),  # it crossed HANDOFF on the wire
            _E.ADOPT: Edge(_S.ADOPTED, _O.CLOSE_CLIENT),
            _E.REJECT: _RETURNED,
            _E.ABORT: Edge(_S.RECALLED, _O.SEND_ABORT),
            # The queue of a dead link is read to its end first, so this was not adopted.
            _E.LINK_LOST: _RETURNED,
            _E.PEER_GONE: _RETURNED,
        },
        _S.ADOPTED: {
            _E.RELEASE: _FREED,
            _E.ABORT: _ABORTED,
            _E.LINK_LOST: _QUARANTINED,
            _E.PEER_GONE: _FREED,
        },
        _S.RECALLED: {
            _E.NOCHUNK: Edge(_S.RECALLED),
            _E.ADOPT: Edge(_S.ABORTING, _O.CLOSE_CLIENT),  # it crossed ABORT on the wire
            _E.REJECT: _FREED,  # it implies RELEASE; the one that answers ABORT comes too late
            _E.RELEASE: _FREED,
            _E.LINK_LOST: _QUARANTINED,
            _E.PEER_GONE: _FREED,
        },
        _S.ABORTING: {
            _E.NOCHUNK: Edge(_S.ABORTING),
            _E.RELEASE: _FREED,
            _E.LINK_LOST: _QUARANTINED,
            _E.PEER_GONE: _FREED,
        },
        _S.QUARANTINED: {
            _E.RELEASE: _FREED,  # over the next link to the same peer
            _E.LINK_LOST: Edge(_S.QUARANTINED),  # that one too; the time of grace runs on
            _E.PEER_GONE: _FREED,
            _E.HELD: Edge(_S.QUARANTINED),  # until it is released; it is revoked already
            _E.NOT_HELD: _FREED,
            _E.EXPIRED: _FREED,
        },
    }
)
"""Where each event leads from each state."""

OUR_EVENTS = frozenset({LeaseEvent.CHUNK_SENT, LeaseEvent.HANDOFF_SENT})
"""Reports of our own doings: out of place they are a bug of ours, not something to ignore."""
