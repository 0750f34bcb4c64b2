"""Connections: each order that is legal, each that is not, the epoch, and the hand-off."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from protocol import messages as m
from protocol.codec import encode_message
from protocol.connection import Connection
from protocol.errors import (
    FrameTooLargeError,
    InvalidMessageError,
    LocalProtocolError,
    MalformedFrameError,
    RemoteProtocolError,
    StaleEpochError,
    UnexpectedMessageError,
)
from protocol.frames import LENGTH, encode_frame
from protocol.limits import MAX_LINK_BODY_BYTES, VERSION
from protocol.states import Role, State
from tests.unit.protocol.samples import OTHER_EPOCH, SAMPLES


class Pair:
    """Both ends of one connection; whatever one sends, the other must take at once."""

    def __init__(self, one: Role, other: Role) -> None:
        self.one, self.other = Connection(one), Connection(other)

    def pass_on(self, sender: Connection, kind: type[m.Message]) -> None:
        receiver = self.other if sender is self.one else self.one
        frame = sender.send(SAMPLES[kind])
        for byte in frame[:-1]:
            receiver.receive_data(bytes([byte]))
            assert receiver.next_event() is None
        receiver.receive_data(frame[-1:])
        assert receiver.next_event() == SAMPLES[kind]
        assert receiver.next_event() is None

    @property
    def states(self) -> tuple[State, State]:
        return self.one.state, self.other.state


def opened_link() -> Pair:
    pair = Pair(Role.PREFILLD_LINK, Role.DECODED_LINK)
    for sender, kind in [
        (pair.one, m.Hello),
        (pair.other, m.Welcome),
        (pair.one, m.Map),
        (pair.other, m.Mapped),
    ]:
        pair.pass_on(sender, kind)
    return pair


def streaming_prefilld() -> Connection:
    connection = Connection(Role.PREFILLD_CLIENT)
    connection.receive_data(encode_message(SAMPLES[m.Generate]))
    connection.next_event()
    connection.send(SAMPLES[m.Accepted])
    return connection


def fed(role: Role, *messages: m.Message) -> Connection:
    connection = Connection(role)
    for message in messages:
        connection.receive_data(encode_message(message))
    return connection


def test_a_request_lives_from_generate_to_end() -> None:
    """ACCEPTED, any number of TOKENS, END: both ends agree after every message."""
    pair = Pair(Role.CLIENT, Role.PREFILLD_CLIENT)
    seen = [pair.states]
    for sender, kind in [
        (pair.one, m.Generate),
        (pair.other, m.Accepted),
        (pair.other, m.Tokens),
        (pair.one, m.Cancel),
        (pair.other, m.Tokens),
        (pair.other, m.End),
    ]:
        pair.pass_on(sender, kind)
        seen.append(pair.states)
    streaming = (State.STREAMING, State.STREAMING)
    assert seen == [
        (State.IDLE, State.IDLE),
        (State.JUDGING, State.JUDGING),
        *[streaming] * 4,
        (State.DONE, State.CLOSED),
    ]


@pytest.mark.parametrize("daemon", [Role.PREFILLD_CLIENT, Role.DECODED_CLIENT])
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        (m.StatusRequest, m.Status),
        (m.StatusRequest, m.Error),
        (m.MetricsRequest, m.Metrics),
        (m.MetricsRequest, m.Error),
    ],
)
def test_both_daemons_answer_who_they_are(
    daemon: Role, question: type[m.Message], answer: type[m.Message]
) -> None:
    """One question, one answer, and the connection is over."""
    pair = Pair(Role.CLIENT, daemon)
    pair.pass_on(pair.one, question)
    pair.pass_on(pair.other, answer)
    assert pair.states == (State.DONE, State.CLOSED)


@pytest.mark.parametrize("answer", [m.Checked, m.Error])
def test_check_is_answered_once(answer: type[m.Message]) -> None:
    """CHECK runs nothing, so nothing streams."""
    pair = Pair(Role.CLIENT, Role.PREFILLD_CLIENT)
    pair.pass_on(pair.one, m.Check)
    pair.pass_on(pair.other, answer)
    assert pair.states == (State.DONE, State.CLOSED)


def test_a_daemon_may_refuse_before_anything_was_asked() -> None:
    """`draining` goes out at once; the request that crosses it is discarded."""
    pair = Pair(Role.CLIENT, Role.PREFILLD_CLIENT)
    crossing = pair.one.send(SAMPLES[m.Generate])
    pair.pass_on(pair.other, m.Error)
    pair.other.receive_data(crossing)
    assert pair.other.next_event() is None
    assert pair.states == (State.DONE, State.CLOSED)


def test_a_link_opens_by_five_messages_and_then_works() -> None:
    """HELLO, WELCOME, MAP, MAPPED, and then any of the open phase from either side."""
    pair = opened_link()
    assert pair.states == (State.OPEN, State.OPEN)
    for kind in (m.Chunk, m.Handoff, m.Abort, m.Ping, m.Pong):
        pair.pass_on(pair.one, kind)
    for kind in (m.NoChunk, m.Adopt, m.Reject, m.Release, m.CreditUpdate, m.Ping, m.Pong, m.Drain):
        pair.pass_on(pair.other, kind)
    assert pair.states == (State.OPEN, State.OPEN)


def test_whoever_says_hello_to_decoded_is_on_the_link() -> None:
    """Clients and prefilld knock at one socket; the first message tells which it is."""
    pair = Pair(Role.PREFILLD_LINK, Role.DECODED_CLIENT)
    pair.pass_on(pair.one, m.Hello)
    assert pair.other.role is Role.DECODED_LINK
    pair.pass_on(pair.other, m.Welcome)
    pair.pass_on(pair.one, m.Map)
    assert pair.states == (State.MAPPING, State.MAPPING)


@pytest.mark.parametrize(
    ("version", "code"), [(VERSION + 1, "version"), (VERSION, "invalid-message")]
)
def test_a_hello_that_cannot_be_read_is_refused_as_a_link(version: int, code: str) -> None:
    """A newer prefilld may say HELLO in other words; it must learn that the versions differ."""
    prefilld, decoded = Connection(Role.PREFILLD_LINK), Connection(Role.DECODED_CLIENT)
    prefilld.send(SAMPLES[m.Hello])
    decoded.receive_data(encode_frame({"type": "hello", "version": version, "news": True}))
    with pytest.raises(RemoteProtocolError, match=r"here and \d+ there|hello: ") as caught:
        decoded.next_event()
    assert caught.value.code == code
    prefilld.receive_data(decoded.farewell(caught.value))
    refusal = prefilld.next_event()
    assert isinstance(refusal, m.Refuse)
    assert refusal.code == code


def test_who_leaves_still_hears_what_was_under_way() -> None:
    """Decoded's RELEASE that crosses prefilld's BYE must not be lost."""
    pair = opened_link()
    crossing = pair.other.send(SAMPLES[m.Release])
    pair.pass_on(pair.one, m.Bye)
    pair.one.receive_data(crossing)
    assert pair.one.next_event() == SAMPLES[m.Release]
    pair.pass_on(pair.other, m.Adopt)
    pair.pass_on(pair.other, m.Bye)
    assert pair.states == (State.CLOSED, State.CLOSED)


@pytest.mark.parametrize("num_messages", [0, 1, 2, 3, 4])
def test_decoded_may_refuse_at_any_point_of_the_hand_shake(num_messages: int) -> None:
    """A busy, foreign, small, unproved or slow link is refused when that is found out."""
    pair = Pair(Role.PREFILLD_LINK, Role.DECODED_LINK)
    steps = [
        (pair.one, m.Hello),
        (pair.other, m.Welcome),
        (pair.one, m.Map),
        (pair.other, m.Mapped),
    ]
    for sender, kind in steps[:num_messages]:
        pair.pass_on(sender, kind)
    pair.pass_on(pair.other if num_messages < 4 else pair.one, m.Refuse)
    assert pair.states == (State.CLOSED, State.CLOSED)


@pytest.mark.parametrize(
    ("role", "kinds"),
    [
        (Role.PREFILLD_CLIENT, [m.Cancel]),
        (Role.PREFILLD_CLIENT, [m.Generate, m.Generate]),
        (Role.PREFILLD_CLIENT, [m.Generate, m.StatusRequest]),
        (Role.PREFILLD_CLIENT, [m.StatusRequest, m.Cancel]),
        (Role.DECODED_CLIENT, [m.Cancel]),
        (Role.DECODED_CLIENT, [m.Generate]),
        (Role.DECODED_MIGRATED, [m.StatusRequest]),
        (Role.DECODED_MIGRATED, [m.Generate]),
        (Role.CLIENT, [m.Tokens]),
        (Role.CLIENT, [m.Accepted]),
        (Role.DECODED_LINK, [m.Map]),
        (Role.DECODED_LINK, [m.Hello, m.Hello]),
        (Role.DECODED_LINK, [m.Hello, m.Map]),
        (Role.DECODED_LINK, [m.Hello, m.Handoff]),
        (Role.PREFILLD_LINK, [m.Welcome]),
        (Role.PREFILLD_LINK, [m.Adopt]),
    ],
)
def test_an_order_that_is_illegal_fails_the_connection(
    role: Role, kinds: list[type[m.Message]]
) -> None:
    """The text says what came and where; after it nothing more is said or heard."""
    connection = fed(role, *(SAMPLES[kind] for kind in kinds))
    for kind in kinds[:-1]:
        assert connection.next_event() == SAMPLES[kind]
    place = connection.state.value
    with pytest.raises(UnexpectedMessageError, match=f"may not arrive in state {place} of"):
        connection.next_event()
    assert connection.state is State.FAILED
    connection.receive_data(encode_message(SAMPLES[kinds[0]]))
    assert connection.next_event() is None


@pytest.mark.parametrize("kind", [m.Generate, m.Check])
def test_who_asks_decoded_is_told_whose_socket_it_is(kind: type[m.Message]) -> None:
    connection = fed(Role.DECODED_CLIENT, SAMPLES[kind])
    with pytest.raises(UnexpectedMessageError, match="this is decoded's socket, prefilld's takes"):
        connection.next_event()


def test_nothing_may_follow_end() -> None:
    """END is the last message, so a daemon that goes on is broken."""
    pair = Pair(Role.CLIENT, Role.PREFILLD_CLIENT)
    pair.pass_on(pair.one, m.Generate)
    pair.pass_on(pair.other, m.Accepted)
    pair.pass_on(pair.other, m.End)
    pair.one.receive_data(encode_message(SAMPLES[m.Tokens]))
    with pytest.raises(UnexpectedMessageError, match="tokens may not arrive in state done"):
        pair.one.next_event()


def test_sending_out_of_order_is_our_own_bug_and_changes_nothing() -> None:
    """The peer never sees it, and the connection is as it was."""
    connection = Connection(Role.PREFILLD_CLIENT)
    with pytest.raises(LocalProtocolError, match="end may not be sent in state idle of prefilld"):
        connection.send(SAMPLES[m.End])
    assert connection.state is State.IDLE


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (LENGTH.pack(MAX_LINK_BODY_BYTES + 1), FrameTooLargeError),
        (LENGTH.pack(1) + b"\xc0", MalformedFrameError),
        (LENGTH.pack(1) + b"\x80", InvalidMessageError),
        (LENGTH.pack(12) + b"\x81\xa4type\xa5chunk", InvalidMessageError),
    ],
)
def test_broken_bytes_fail_the_connection(data: bytes, error: type[Exception]) -> None:
    """One documented error comes out, once."""
    connection = Connection(Role.DECODED_LINK)
    connection.receive_data(data)
    with pytest.raises(error, match=r"\S"):
        connection.next_event()
    assert connection.state is State.FAILED
    assert connection.next_event() is None


def test_the_limit_on_requests_is_the_daemons_to_set() -> None:
    """`max_request_bytes` comes from its configuration."""
    connection = Connection(Role.PREFILLD_CLIENT, max_body_bytes=100)
    connection.receive_data(LENGTH.pack(101))
    with pytest.raises(FrameTooLargeError, match="101 bytes exceeds the 100"):
        connection.next_event()


def test_a_reply_above_the_clients_limit_is_never_sent() -> None:
    """A daemon finds out before the client does."""
    connection = fed(Role.PREFILLD_CLIENT, SAMPLES[m.MetricsRequest])
    connection.next_event()
    with pytest.raises(LocalProtocolError, match=r"metrics: a body of .* exceeds 4194304"):
        connection.send(m.Metrics(text="x" * (4 << 20)))
    connection.send(m.Error(code="internal", message="too much to say", retryable=False))


# --- epochs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [m.Chunk, m.Handoff, m.Abort])
def test_decoded_refuses_a_lease_of_another_epoch(kind: type[m.Message]) -> None:
    """Block ids of a pool that is gone would read somebody else's cache."""
    pair = opened_link()
    stale = replace(SAMPLES[kind], epoch=OTHER_EPOCH)
    pair.other.receive_data(encode_message(stale))
    with pytest.raises(StaleEpochError, match=r"0{32} is stale; the current one is 00010203"):
        pair.other.next_event()
    assert pair.other.state is State.FAILED


@pytest.mark.parametrize("kind", [m.NoChunk, m.Adopt, m.Reject, m.Release])
def test_prefilld_refuses_answers_of_another_epoch(kind: type[m.Message]) -> None:
    """A RELEASE of an earlier pool must not free a block of this one."""
    pair = opened_link()
    stale = replace(SAMPLES[kind], epoch=OTHER_EPOCH)
    pair.one.receive_data(encode_message(stale))
    with pytest.raises(StaleEpochError, match="is stale"):
        pair.one.next_event()


def test_naming_another_epoch_ourselves_is_our_bug() -> None:
    """The fence stands on both sides."""
    pair = opened_link()
    with pytest.raises(LocalProtocolError, match=r"abort names epoch 0{32}, the link is of 0001"):
        pair.one.send(replace(SAMPLES[m.Abort], epoch=OTHER_EPOCH))
    assert pair.one.state is State.OPEN


# --- the end of the stream ----------------------------------------------------------------------


def test_whole_frames_before_the_end_still_count() -> None:
    """A dead peer's last words are delivered; a cut frame is dropped, not guessed at."""
    pair = opened_link()
    adopt, release = encode_message(SAMPLES[m.Adopt]), encode_message(SAMPLES[m.Release])
    pair.one.receive_data(adopt + release[:-1])
    pair.one.receive_eof()
    assert pair.one.has_eof
    assert pair.one.next_event() == SAMPLES[m.Adopt]
    assert pair.one.next_event() is None


# --- telling the peer ---------------------------------------------------------------------------


def test_a_client_is_told_what_it_did_wrong() -> None:
    """The daemon lives on; the client gets one ERROR with the code."""
    pair = Pair(Role.CLIENT, Role.PREFILLD_CLIENT)
    pair.one.send(SAMPLES[m.Generate])
    pair.other.receive_data(LENGTH.pack(1) + b"\xc0")
    with pytest.raises(MalformedFrameError, match="NoneType") as caught:
        pair.other.next_event()
    pair.one.receive_data(pair.other.farewell(caught.value))
    error = pair.one.next_event()
    assert isinstance(error, m.Error)
    assert (error.code, error.retryable) == ("malformed-frame", False)
    assert "NoneType" in error.message
    assert pair.other.state is State.CLOSED


def test_a_daemon_is_told_what_it_did_wrong() -> None:
    """On the link REFUSE says it, in any phase, with the code of the fault."""
    pair = opened_link()
    pair.other.receive_data(encode_message(replace(SAMPLES[m.Abort], epoch=OTHER_EPOCH)))
    with pytest.raises(StaleEpochError, match="is stale") as caught:
        pair.other.next_event()
    pair.one.receive_data(pair.other.farewell(caught.value))
    refusal = pair.one.next_event()
    assert isinstance(refusal, m.Refuse)
    assert refusal.code == "stale-epoch"
    assert pair.states == (State.CLOSED, State.CLOSED)


def test_a_client_tells_nobody() -> None:
    """It closes; there is no message with which to scold a daemon."""
    connection = fed(Role.CLIENT, SAMPLES[m.Tokens])
    with pytest.raises(UnexpectedMessageError, match="tokens") as caught:
        connection.next_event()
    assert connection.farewell(caught.value) == b""


def test_there_is_no_farewell_without_a_fault() -> None:
    """It is the answer to an error that `next_event` raised, nothing else."""
    error = UnexpectedMessageError(message="x", state="y")
    with pytest.raises(LocalProtocolError, match="nothing failed in state idle"):
        Connection(Role.PREFILLD_CLIENT).farewell(error)


# --- the hand-off -------------------------------------------------------------------------------


def test_bytes_that_were_read_but_not_parsed_move_on_with_the_connection() -> None:
    """A CANCEL cut in two by the hand-off is whole again at decoded."""
    prefilld = streaming_prefilld()
    cancel = encode_message(m.Cancel())
    prefilld.receive_data(cancel[:7])
    assert prefilld.next_event() is None
    decoded = Connection(Role.DECODED_MIGRATED)
    decoded.receive_data(prefilld.hand_off())
    decoded.receive_data(cancel[7:])
    assert decoded.next_event() == m.Cancel()
    decoded.send(SAMPLES[m.Tokens])
    decoded.send(SAMPLES[m.End])
    assert decoded.state is State.CLOSED


def test_a_connection_that_was_handed_off_is_not_ours() -> None:
    """Neither read nor written: its bytes are decoded's now."""
    prefilld = streaming_prefilld()
    prefilld.hand_off()
    assert prefilld.next_event() is None
    with pytest.raises(LocalProtocolError, match="tokens may not be sent in state handed-off"):
        prefilld.send(SAMPLES[m.Tokens])
    with pytest.raises(LocalProtocolError, match="a connection that was handed off"):
        prefilld.receive_data(b"x")


def test_what_decoded_did_not_adopt_comes_back_whole() -> None:
    """After REJECT prefilld goes on where it stopped, residue first."""
    prefilld = streaming_prefilld()
    cancel = encode_message(m.Cancel())
    prefilld.receive_data(cancel[:5])
    residue = prefilld.hand_off()
    prefilld.reclaim(residue)
    prefilld.receive_data(cancel[5:])
    assert prefilld.next_event() == m.Cancel()
    prefilld.send(SAMPLES[m.Error])


def test_only_a_running_answer_can_be_handed_off() -> None:
    """Before ACCEPTED there is nothing to go on with, after END nothing is left."""
    for connection in (Connection(Role.PREFILLD_CLIENT), Connection(Role.DECODED_MIGRATED)):
        with pytest.raises(LocalProtocolError, match="nothing can be handed off in state"):
            connection.hand_off()
        with pytest.raises(LocalProtocolError, match="nothing can be reclaimed in state"):
            connection.reclaim(b"")


def test_a_connection_says_where_it_stands() -> None:
    """Its repr is what a debugger and a log line show."""
    assert repr(Connection(Role.DECODED_LINK)) == "<Connection decoded on the link: start>"
