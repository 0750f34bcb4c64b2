"""Every legal move on every kind of connection, as data.

Theory of operation.  A connection has two ends, and each end follows one table: what it may
send and what may arrive, by state.  A row says `message -> next state`; what is in no row is
illegal.  There are no conditions beside the tables.  Two rules made them:

1.  Ends never wait for each other to change state, so what was legal when it left must still be
    legal when it arrives.  Where two messages can cross, the later state accepts both.
2.  Only the order on one connection is judged here.  Whether a lease may be released, or
    released again, is the lease tables' business.

`CLOSED` discards whatever arrives: it crossed our last message on its way.  `DONE` is a client
that has its whole answer: nothing can cross the last message, so anything more is a fault.
`FAILED` is a connection whose peer broke the rules; it can still tell the peer which.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType, UnionType
from typing import Final, get_args

from protocol import limits
from protocol import messages as m

Row = Mapping[type[m.Message], "State"]
Table = Mapping["State", Row]


class Role(Enum):
    """Which end of which kind of connection."""

    CLIENT = "client"
    PREFILLD_CLIENT = "prefilld to a client"
    DECODED_CLIENT = "decoded to whoever connected"
    DECODED_MIGRATED = "decoded to a client that was handed over"
    PREFILLD_LINK = "prefilld on the link"
    DECODED_LINK = "decoded on the link"


class State(Enum):
    """Where a connection stands, as one end sees it."""

    # connections of clients
    IDLE = "idle"
    JUDGING = "judging"
    STREAMING = "streaming"
    CHECKING = "checking"
    REPORTING = "reporting"
    MEASURING = "measuring"
    HANDED_OFF = "handed-off"
    DONE = "done"
    # the link
    START = "start"
    GREETED = "greeted"
    WELCOMED = "welcomed"
    MAPPING = "mapping"
    OPEN = "open"
    LEAVING = "leaving"
    PEER_LEFT = "peer-left"
    # both
    CLOSED = "closed"
    FAILED = "failed"


EXPLANATIONS: Final[Mapping[State, str]] = MappingProxyType(
    {
        State.IDLE: "nothing was asked yet",
        State.JUDGING: "GENERATE was sent; ACCEPTED or ERROR answers",
        State.STREAMING: "the request was accepted; TOKENS follow until END or ERROR",
        State.CHECKING: "CHECK was sent; CHECKED or ERROR answers",
        State.REPORTING: "STATUS-REQUEST was sent; STATUS or ERROR answers",
        State.MEASURING: "METRICS-REQUEST was sent; METRICS or ERROR answers",
        State.HANDED_OFF: "decoded has the connection, or is about to; nothing is read or sent",
        State.DONE: "the last message arrived; anything more is a fault",
        State.START: "connected, nothing said",
        State.GREETED: "HELLO was sent; WELCOME or REFUSE answers",
        State.WELCOMED: "WELCOME was sent; MAP follows",
        State.MAPPING: "MAP was sent; MAPPED or REFUSE answers",
        State.OPEN: "the pool is mapped and proved; requests pass",
        State.LEAVING: "we said BYE; what the peer sent before it knew is still taken",
        State.PEER_LEFT: "the peer said BYE; answers to what it sent before may still go out",
        State.CLOSED: "we are finished; what arrives is discarded",
        State.FAILED: "the peer broke the rules; one message may tell it which",
    }
)

S = State

# --- connections of clients ------------------------------------------------------------------

_ASK: Row = {
    m.Generate: S.JUDGING,
    m.Check: S.CHECKING,
    m.StatusRequest: S.REPORTING,
    m.MetricsRequest: S.MEASURING,
}
# Clients and prefilld knock at the same socket; HELLO turns the role into DECODED_LINK.
_ASK_DECODED: Row = {
    m.StatusRequest: S.REPORTING,
    m.MetricsRequest: S.MEASURING,
    m.Hello: S.GREETED,
}


def _answers(end: State) -> dict[State, Row]:
    """Return what a daemon may say to a client by state; its last message leads to `end`."""
    return {
        S.IDLE: {m.Error: end},
        S.JUDGING: {m.Accepted: S.STREAMING, m.Error: end},
        S.STREAMING: {m.Tokens: S.STREAMING, m.End: end, m.Error: end},
        S.CHECKING: {m.Checked: end, m.Error: end},
        S.REPORTING: {m.Status: end, m.Error: end},
        S.MEASURING: {m.Metrics: end, m.Error: end},
    }


def _cancels(*states: State) -> dict[State, Row]:
    return {state: {m.Cancel: state} for state in states}


_TELL: dict[State, Row] = {S.FAILED: {m.Error: S.CLOSED}}

# --- the link --------------------------------------------------------------------------------


def _all(union: UnionType, state: State) -> dict[type[m.Message], State]:
    return dict.fromkeys(get_args(union), state)


_END: dict[type[m.Message], State] = {m.Bye: S.LEAVING, m.Refuse: S.CLOSED}
_ENDED: dict[type[m.Message], State] = {m.Bye: S.PEER_LEFT, m.Refuse: S.CLOSED}
_REFUSED: Row = {m.Bye: S.CLOSED, m.Refuse: S.CLOSED}

_WORK = m.Chunk | m.Handoff | m.Abort | m.Ping | m.Pong
_ANSWERS = m.NoChunk | m.Adopt | m.Reject | m.Release | m.CreditUpdate | m.Pong

_PREFILLD_LINK_SENDS: Table = {
    S.START: {m.Hello: S.GREETED},
    S.GREETED: _END,
    S.WELCOMED: {m.Map: S.MAPPING, **_END},
    S.MAPPING: _END,
    S.OPEN: {**_all(_WORK, S.OPEN), **_END},
    S.PEER_LEFT: {m.Bye: S.CLOSED},
    S.FAILED: {m.Refuse: S.CLOSED},
}
_PREFILLD_LINK_RECEIVES: Table = {
    # Until it has read HELLO decoded takes us for a client, and refuses us like one.
    S.START: {m.Error: S.CLOSED, **_ENDED},
    S.GREETED: {m.Welcome: S.WELCOMED, m.Error: S.CLOSED, **_ENDED},
    S.WELCOMED: _ENDED,
    S.MAPPING: {m.Mapped: S.OPEN, **_ENDED},
    S.OPEN: {**_all(_ANSWERS | m.Ping | m.Drain, S.OPEN), **_ENDED},
    S.LEAVING: {**_all(m.LinkToPrefilld, S.LEAVING), **_REFUSED, m.Error: S.CLOSED},
    S.PEER_LEFT: {m.Refuse: S.CLOSED},
}
_DECODED_LINK_SENDS: Table = {
    S.START: _END,
    S.GREETED: {m.Welcome: S.WELCOMED, **_END},
    S.WELCOMED: _END,
    S.MAPPING: {m.Mapped: S.OPEN, **_END},
    S.OPEN: {**_all(_ANSWERS | m.Ping | m.Drain, S.OPEN), **_END},
    S.PEER_LEFT: {**_all(_ANSWERS, S.PEER_LEFT), m.Bye: S.CLOSED},
    S.FAILED: {m.Refuse: S.CLOSED},
}
_DECODED_LINK_RECEIVES: Table = {
    S.START: {m.Hello: S.GREETED},
    S.GREETED: _ENDED,
    S.WELCOMED: {m.Map: S.MAPPING, **_ENDED},
    S.MAPPING: _ENDED,
    S.OPEN: {**_all(_WORK, S.OPEN), **_ENDED},
    S.LEAVING: {**_all(m.LinkToDecoded, S.LEAVING), **_REFUSED},
    S.PEER_LEFT: {m.Refuse: S.CLOSED},
}

# --- the tables ------------------------------------------------------------------------------

INITIAL: Final[Mapping[Role, State]] = MappingProxyType(
    {
        Role.CLIENT: S.IDLE,
        Role.PREFILLD_CLIENT: S.IDLE,
        Role.DECODED_CLIENT: S.IDLE,
        Role.DECODED_MIGRATED: S.STREAMING,
        Role.PREFILLD_LINK: S.START,
        Role.DECODED_LINK: S.START,
    }
)

SENDS: Final[Mapping[Role, Table]] = MappingProxyType(
    {
        Role.CLIENT: {S.IDLE: _ASK, **_cancels(S.JUDGING, S.STREAMING)},
        Role.PREFILLD_CLIENT: {**_answers(S.CLOSED), **_TELL},
        Role.DECODED_CLIENT: {
            state: row
            for state, row in (_answers(S.CLOSED) | _TELL).items()
            if state in (S.IDLE, S.REPORTING, S.MEASURING, S.FAILED)
        },
        Role.DECODED_MIGRATED: {S.STREAMING: _answers(S.CLOSED)[S.STREAMING], **_TELL},
        Role.PREFILLD_LINK: _PREFILLD_LINK_SENDS,
        Role.DECODED_LINK: _DECODED_LINK_SENDS,
    }
)
"""What each role may send in each state, and the state that follows."""

RECEIVES: Final[Mapping[Role, Table]] = MappingProxyType(
    {
        Role.CLIENT: _answers(S.DONE),
        Role.PREFILLD_CLIENT: {S.IDLE: _ASK, **_cancels(S.JUDGING, S.STREAMING)},
        Role.DECODED_CLIENT: {S.IDLE: _ASK_DECODED},
        Role.DECODED_MIGRATED: _cancels(S.STREAMING),
        Role.PREFILLD_LINK: _PREFILLD_LINK_RECEIVES,
        Role.DECODED_LINK: _DECODED_LINK_RECEIVES,
    }
)
"""What may arrive at each role in each state, and the state that follows."""

INCOMING: Final[Mapping[Role, UnionType]] = MappingProxyType(
    {
        Role.CLIENT: m.FromDaemon,
        Role.PREFILLD_CLIENT: m.ToPrefilld,
        Role.DECODED_CLIENT: m.ToDecoded | m.Hello,
        Role.DECODED_MIGRATED: m.ToDecoded,
        Role.PREFILLD_LINK: m.LinkToPrefilld,
        Role.DECODED_LINK: m.LinkToDecoded,
    }
)
"""The schema of what arrives at each role, whatever its state."""

MAX_RECEIVED_BYTES: Final[Mapping[Role, int]] = MappingProxyType(
    {
        Role.CLIENT: limits.MAX_REPLY_BODY_BYTES,
        Role.PREFILLD_CLIENT: limits.DEFAULT_MAX_REQUEST_BYTES,
        Role.DECODED_CLIENT: limits.MAX_LINK_BODY_BYTES,  # it may turn out to be the link
        Role.DECODED_MIGRATED: limits.MAX_FOLLOW_UP_BYTES,
        Role.PREFILLD_LINK: limits.MAX_LINK_BODY_BYTES,
        Role.DECODED_LINK: limits.MAX_LINK_BODY_BYTES,
    }
)
"""Largest body that each role takes unless its connection is told otherwise."""

MAX_SENT_BYTES: Final[Mapping[Role, int | None]] = MappingProxyType(
    {
        Role.CLIENT: None,  # each daemon's configuration decides, and answers frame-too-large
        Role.PREFILLD_CLIENT: limits.MAX_REPLY_BODY_BYTES,
        Role.DECODED_CLIENT: limits.MAX_REPLY_BODY_BYTES,
        Role.DECODED_MIGRATED: limits.MAX_REPLY_BODY_BYTES,
        Role.PREFILLD_LINK: limits.MAX_LINK_BODY_BYTES,
        Role.DECODED_LINK: limits.MAX_LINK_BODY_BYTES,
    }
)
"""Largest body that each role's peer takes; None where the role cannot know."""
