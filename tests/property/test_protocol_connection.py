"""Two honest ends, any choice of messages, any delay between them."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.codec import encode_message
from protocol.connection import Connection
from protocol.errors import LocalProtocolError, RemoteProtocolError, UnexpectedMessageError
from protocol.states import INITIAL, RECEIVES, SENDS, Role, State
from tests.unit.protocol.samples import EPOCH, SAMPLES

PAIRS = [
    (Role.CLIENT, Role.PREFILLD_CLIENT),
    (Role.CLIENT, Role.DECODED_CLIENT),
    (Role.PREFILLD_LINK, Role.DECODED_LINK),
    (Role.PREFILLD_LINK, Role.DECODED_CLIENT),
]
# Questions that only prefilld answers, so an honest client does not put them to decoded.
NOT_FOR_DECODED = {m.Generate, m.Check}


class End:
    """One end, and the bytes on their way to it."""

    def __init__(self, role: Role) -> None:
        self.connection = Connection(role)
        self.incoming: deque[bytes] = deque()

    def choices(self, peer: End) -> list[type[m.Message]]:
        row = SENDS[self.connection.role].get(self.connection.state, {})
        banned = NOT_FOR_DECODED if peer.connection.role is Role.DECODED_CLIENT else set()
        return [kind for kind in row if kind not in banned]

    def receive_one(self) -> None:
        self.connection.receive_data(self.incoming.popleft())
        self.connection.next_event()


@pytest.mark.parametrize("roles", PAIRS, ids=str)
@given(data=st.data())
def test_whatever_honest_ends_say_and_however_it_crosses_both_understand(
    roles: tuple[Role, Role], data: st.DataObject
) -> None:
    """What was legal when it left is legal when it arrives: rule 1 of the tables."""
    ends = (End(roles[0]), End(roles[1]))
    for _ in range(data.draw(st.integers(1, 25))):
        index = data.draw(st.integers(0, 1))
        end, peer = ends[index], ends[1 - index]
        choices = end.choices(peer)
        if end.incoming and (not choices or data.draw(st.booleans())):
            end.receive_one()
        elif choices:
            kind = data.draw(st.sampled_from(choices))
            peer.incoming.append(end.connection.send(SAMPLES[kind]))
    for end in ends:
        while end.incoming:
            end.receive_one()
        assert end.connection.state is not State.FAILED


def connection_in(role: Role, state: State) -> Connection:
    connection = Connection(role)
    connection._state = state
    connection._epoch = EPOCH
    return connection


@given(role=st.sampled_from(Role), state=st.sampled_from(State), message=st.data())
def test_a_received_message_moves_as_the_table_says_or_fails(
    role: Role, state: State, message: st.DataObject
) -> None:
    """Over every state and message: the table decides, and nothing else is raised."""
    sample = message.draw(st.sampled_from(list(SAMPLES.values())))
    connection = connection_in(role, state)
    if state is State.HANDED_OFF:
        with pytest.raises(LocalProtocolError, match="handed off"):
            connection.receive_data(encode_message(sample))
        return
    connection.receive_data(encode_message(sample))
    if state in (State.CLOSED, State.FAILED):
        assert connection.next_event() is None
        assert connection.state is state
        return
    following = RECEIVES[role].get(state, {}).get(type(sample))
    if following is None:
        with pytest.raises(UnexpectedMessageError, match="may not arrive"):
            connection.next_event()
        assert connection.state is State.FAILED
    else:
        assert connection.next_event() == sample
        assert connection.state is following


@given(role=st.sampled_from(Role), state=st.sampled_from(State), message=st.data())
def test_a_sent_message_moves_as_the_table_says_or_changes_nothing(
    role: Role, state: State, message: st.DataObject
) -> None:
    """Over every state and message: either bytes and the next state, or LocalProtocolError."""
    sample = message.draw(st.sampled_from(list(SAMPLES.values())))
    connection = connection_in(role, state)
    following = SENDS[role].get(state, {}).get(type(sample))
    if following is None:
        with pytest.raises(LocalProtocolError, match="may not be sent"):
            connection.send(sample)
        assert connection.state is state
    else:
        assert connection.send(sample) == encode_message(sample)
        assert connection.state is following


@given(role=st.sampled_from(Role), data=st.binary(max_size=300), junk=st.binary(max_size=300))
def test_after_a_fault_a_connection_is_silent(role: Role, data: bytes, junk: bytes) -> None:
    """It raises once at most, and what comes later is neither parsed nor kept."""
    connection = Connection(role)
    connection.receive_data(data)
    try:
        while connection.next_event() is not None:
            pass
    except RemoteProtocolError:
        connection.receive_data(junk)
        assert connection.next_event() is None
        assert connection.num_received_bytes == connection.num_parsed_bytes
    else:
        assert connection.state is INITIAL[role]
