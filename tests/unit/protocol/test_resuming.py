"""The rules of resumption, without sockets and without waiting."""

from __future__ import annotations

from typing import Any

import pytest

from protocol import messages as m
from protocol.codec import encode_message
from protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    InvalidMessageError,
    ListenQueueFullError,
    NoSuchSocketError,
    NotListeningError,
    ProtocolError,
    RequestError,
    SocketForbiddenError,
    SocketPathError,
    UnixSocketError,
)
from protocol.exchange import Exchange
from protocol.limits import MAX_ATTEMPT
from protocol.resuming import (
    FIRST_PAUSE_S,
    LATER_CODES,
    LOSS_CODES,
    MAX_PAUSE_S,
    Loss,
    ResumePolicy,
    Resumption,
)

ACCEPTED = m.Accepted(id="r", seed=7, prompt_tokens=3, cached_tokens=0, fingerprint="f")
LOST = ConnectionLostError("gone")


def resumption(
    request: m.Generate | None = None,
    *,
    chance: float = 0.5,
    **policy: Any,  # noqa: ANN401 - as `ResumePolicy` takes them
) -> Resumption:
    request = request or m.Generate(prompt="Why?", max_tokens=9)
    return Resumption(request, ResumePolicy(**policy), chance=lambda: chance)


def deliver(exchange: Exchange, *messages: m.Message) -> list[m.Message]:
    """Let a connection's daemon say something; return what comes out."""
    exchange.begin()
    for message in messages:
        exchange.receive_data(encode_message(message))
    return [exchange.next_event() for _ in messages]  # type: ignore[misc]


def cut(resuming: Resumption, *messages: m.Message, now_s: float = 0.0) -> float:
    """Let a connection deliver these messages and break; return the pause."""
    for message in deliver(resuming.next_exchange(), *messages):
        resuming.take(message)
    return resuming.failed(LOST, now_s=now_s)


def tokens(index: int, *ids: int) -> m.Tokens:
    return m.Tokens(index=index, ids=[*ids], text="x")


def next_request(resuming: Resumption) -> m.Generate:
    request = resuming.next_exchange()._request
    assert isinstance(request, m.Generate)
    return request


def test_a_cut_answer_is_asked_for_behind_its_last_token() -> None:
    """Under the id and the seed that ACCEPTED told, or prefilld would take it for another."""
    resuming = resumption()
    cut(resuming, ACCEPTED, tokens(0, 1, 2))
    assert next_request(resuming) == m.Generate(
        prompt="Why?",
        max_tokens=9,
        id="r",
        resume=m.Resume(attempt=1, seed=7, fingerprint="f", ids=[1, 2]),
    )
    cut(resuming, ACCEPTED, tokens(2, 3))
    resume = next_request(resuming).resume
    assert resume == m.Resume(attempt=2, seed=7, fingerprint="f", ids=[1, 2, 3])


def test_what_was_not_accepted_is_asked_again_as_it_was() -> None:
    """Nothing was begun, so there is nothing to go on behind."""
    resuming = resumption()
    cut(resuming)
    assert next_request(resuming) == m.Generate(prompt="Why?", max_tokens=9)


def test_a_resumption_that_was_not_accepted_keeps_its_tokens() -> None:
    """The second daemon died before it said a word; the tokens of the first are delivered."""
    resuming = resumption()
    cut(resuming, ACCEPTED, tokens(0, 1))
    cut(resuming)
    resume = next_request(resuming).resume
    assert resume == m.Resume(attempt=2, seed=7, fingerprint="f", ids=[1])


def test_the_caller_sees_one_accepted() -> None:
    """The events of three connections read like those of one."""
    resuming, seen = resumption(), []
    for messages in ([ACCEPTED, tokens(0, 1)], [ACCEPTED, tokens(1, 2)], [ACCEPTED, tokens(2, 3)]):
        seen += [resuming.take(event) for event in deliver(resuming.next_exchange(), *messages)]
        resuming.failed(LOST, now_s=0.0)
    assert [event for event in seen if event is not None] == [
        ACCEPTED,
        tokens(0, 1),
        tokens(1, 2),
        tokens(2, 3),
    ]


@pytest.mark.parametrize("other", [{"seed": 8}, {"fingerprint": "g"}])
def test_another_answer_is_not_taken_for_the_rest_of_this_one(other: dict[str, Any]) -> None:
    """Tokens of another seed would be delivered as if they were this one's."""
    resuming = resumption()
    cut(resuming, ACCEPTED, tokens(0, 1))
    fields = {name: getattr(ACCEPTED, name) for name in ACCEPTED.__struct_fields__}
    with pytest.raises(InvalidMessageError, match="another seed or model"):
        resuming.take(m.Accepted(**{**fields, **other}))


def test_after_the_last_attempt_the_loss_is_told_with_every_token() -> None:
    """What all connections delivered, and how a caller can still go on."""
    resuming = resumption(max_attempts=2)
    cut(resuming, ACCEPTED, tokens(0, 1))
    cut(resuming, ACCEPTED, tokens(1, 2, 3))
    with pytest.raises(ConnectionLostError, match="delivered: 4; it was resumed 2 times") as caught:
        cut(resuming, ACCEPTED, tokens(3, 4))
    assert caught.value.num_tokens == 4
    assert caught.value.resume == m.Resume(attempt=3, seed=7, fingerprint="f", ids=[1, 2, 3, 4])


def test_who_wants_no_attempts_gets_the_loss_itself() -> None:
    """The error that the connection raised, unchanged."""
    with pytest.raises(ConnectionLostError, match="gone") as caught:
        cut(resumption(max_attempts=0), ACCEPTED)
    assert caught.value is LOST


def test_only_tokens_of_this_stream_are_counted() -> None:
    """A caller that resumes by itself had the first ones from elsewhere."""
    brought = m.Resume(attempt=1, seed=7, fingerprint="f", ids=[1, 2])
    resuming = resumption(m.Generate(prompt="Why?", resume=brought))
    assert resuming.num_tokens == 0
    cut(resuming, ACCEPTED, tokens(2, 3))
    assert resuming.num_tokens == 1
    assert next_request(resuming).resume == m.Resume(
        attempt=2, seed=7, fingerprint="f", ids=[1, 2, 3]
    )


def test_the_count_of_attempts_ends_where_the_wire_ends_it() -> None:
    """A caller that resumes for ever sends a legal number."""
    brought = m.Resume(attempt=MAX_ATTEMPT, seed=7, fingerprint="f", ids=[1])
    resuming = resumption(m.Generate(prompt="Why?", resume=brought))
    cut(resuming, ACCEPTED)
    resume = next_request(resuming).resume
    assert resume is not None
    assert resume.attempt == MAX_ATTEMPT


@pytest.mark.parametrize("code", sorted(LOSS_CODES))
def test_an_error_that_tells_of_a_daemons_end_is_a_loss(code: str) -> None:
    """Decoded could still say that it ends; the answer goes on all the same."""
    resuming = resumption()
    deliver(resuming.next_exchange(), ACCEPTED)
    resuming.take(ACCEPTED)
    resuming.failed(RequestError(code, "x", retryable=True), now_s=0.0)
    assert next_request(resuming).resume is not None


def preempt(resuming: Resumption, *messages: m.Message) -> None:
    """Let a connection's answer make room for others."""
    for event in deliver(resuming.next_exchange(), *messages):
        resuming.take(event)
    resuming.failed(RequestError("preempted", "others first", retryable=True), now_s=0.0)


def test_an_answer_that_makes_room_goes_on_without_spending_an_attempt() -> None:
    """No daemon went away; but whoever is let go of for ever is told in the end."""
    losses: list[Loss] = []
    resuming = resumption(max_attempts=1, max_preemptions=2, on_loss=losses.append)
    preempt(resuming, ACCEPTED, tokens(0, 1))
    preempt(resuming, ACCEPTED, tokens(1, 2))
    cut(resuming, ACCEPTED, tokens(2, 3))
    assert [loss.is_preempted for loss in losses] == [True, True, False]
    assert [(loss.attempt, loss.max_attempts) for loss in losses] == [(1, 2), (2, 2), (1, 1)]
    assert next_request(resuming).resume == m.Resume(
        attempt=3, seed=7, fingerprint="f", ids=[1, 2, 3]
    )
    with pytest.raises(RequestError, match="others first"):
        preempt(resuming, ACCEPTED)


def test_who_wants_no_attempts_is_told_of_the_first_preemption() -> None:
    with pytest.raises(RequestError, match="others first"):
        preempt(resumption(max_attempts=0), ACCEPTED)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("internal", "decoded refused it", retryable=False),
        RequestError("timeout", "too long", retryable=True),
        RequestError("model-changed", "another model", retryable=False),
        RequestError("poisoned", "it kills", retryable=False),
        DeadlineError("silent"),
        InvalidMessageError("tokens: nonsense"),
    ],
)
def test_what_is_the_requests_own_fault_is_not_tried_again(
    error: ProtocolError | RequestError,
) -> None:
    """Trying again would take as long and end the same."""
    resuming = resumption()
    deliver(resuming.next_exchange(), ACCEPTED)
    with pytest.raises(type(error), match=str(error)):
        resuming.failed(error, now_s=0.0)


@pytest.mark.parametrize("code", sorted(LATER_CODES | LOSS_CODES))
def test_a_first_request_is_told_at_once_that_it_comes_at_a_bad_time(code: str) -> None:
    """Nothing was begun; whether to come back is the caller's to say."""
    resuming = resumption()
    deliver(resuming.next_exchange())
    with pytest.raises(RequestError, match="later"):
        resuming.failed(RequestError(code, "later", retryable=True), now_s=0.0)


UNREACHABLE: list[UnixSocketError] = [
    NoSuchSocketError("nothing there", path="/s"),
    NotListeningError("nobody listens", path="/s"),
    ListenQueueFullError("behind", path="/s"),
    SocketForbiddenError("not yours yet", path="/s"),
]


@pytest.mark.parametrize("error", UNREACHABLE)
def test_a_first_request_is_told_at_once_that_there_is_no_daemon(error: UnixSocketError) -> None:
    """A user who has not started it shall not wait a minute to hear so."""
    resuming = resumption()
    resuming.next_exchange()
    with pytest.raises(type(error), match=str(error)):
        resuming.failed(error, now_s=0.0)


@pytest.mark.parametrize(
    "error", [*UNREACHABLE, *(RequestError(code, "x", retryable=True) for code in LATER_CODES)]
)
def test_a_daemon_that_is_coming_back_is_waited_for(error: ProtocolError | RequestError) -> None:
    """No socket, one without a listener, or one that drains or is full: all are a restart."""
    resuming = resumption(max_attempts=1, reconnect_timeout_s=20)
    cut(resuming, ACCEPTED, tokens(0, 1))
    now_s = 0.0
    for _ in range(10):
        resuming.next_exchange()
        now_s += resuming.failed(error, now_s=now_s)
    assert now_s < 20
    with pytest.raises(ConnectionLostError, match="nobody went on with it within 20 s") as caught:
        resuming.failed(error, now_s=19.999)
    assert caught.value.resume == m.Resume(attempt=1, seed=7, fingerprint="f", ids=[1])
    assert caught.value.__cause__ is error


def test_a_socket_that_cannot_be_will_not_mend_itself() -> None:
    """Unlike one that is not there."""
    resuming = resumption()
    cut(resuming, ACCEPTED)
    resuming.next_exchange()
    with pytest.raises(SocketPathError, match="too long"):
        resuming.failed(SocketPathError("too long", path="/s"), now_s=0.0)


def test_each_loss_has_the_whole_deadline() -> None:
    """An answer of hours may meet two restarts; the time of the first is not the second's."""
    resuming = resumption(reconnect_timeout_s=1)
    cut(resuming, ACCEPTED)
    cut(resuming, ACCEPTED, now_s=1_000)


def test_losses_without_an_answer_between_them_share_one_deadline() -> None:
    """A daemon that dies of every request must not be waited for attempt by attempt."""
    resuming = resumption(reconnect_timeout_s=1)
    cut(resuming, ACCEPTED)
    with pytest.raises(ConnectionLostError, match="nobody went on"):
        cut(resuming, now_s=1.0)


def test_pauses_grow_to_their_bound_and_begin_anew_with_each_loss() -> None:
    """The first try comes soon, and a daemon that is long in coming is not stormed."""
    resuming = resumption(chance=0.5)
    pauses = [cut(resuming, ACCEPTED)]
    for _ in range(8):
        resuming.next_exchange()
        pauses.append(resuming.failed(UNREACHABLE[0], now_s=0.0))
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_S, MAX_PAUSE_S)
    assert cut(resuming, ACCEPTED) == FIRST_PAUSE_S


def test_chance_spreads_the_clients_of_one_daemon() -> None:
    """They lose it at one moment, and must not come back at one."""
    pauses = {cut(resumption(chance=chance), ACCEPTED) for chance in (0.0, 0.25, 1.0)}
    assert pauses == {0.5 * FIRST_PAUSE_S, 0.75 * FIRST_PAUSE_S, 1.5 * FIRST_PAUSE_S}


def test_a_daemon_that_says_when_to_come_back_is_heeded() -> None:
    """`retry_after_ms` is the least, and chance is added to it."""
    resuming = resumption(chance=0.5)
    cut(resuming, ACCEPTED)
    resuming.next_exchange()
    busy = RequestError("busy", "x", retryable=True, retry_after_ms=2_000)
    assert resuming.failed(busy, now_s=0.0) == 3.0


def test_every_resumption_is_told() -> None:
    """So that a user sees why the text stands still."""
    losses: list[Loss] = []
    resuming = resumption(on_loss=losses.append)
    cut(resuming, ACCEPTED, tokens(0, 1))
    resuming.next_exchange()
    resuming.failed(UNREACHABLE[0], now_s=0.0)
    cut(resuming, ACCEPTED, tokens(1, 2))
    assert losses == [
        Loss(attempt=1, max_attempts=3, num_tokens=1, error=LOST),
        Loss(attempt=2, max_attempts=3, num_tokens=2, error=LOST),
    ]


def test_a_cancelled_answer_is_not_resumed() -> None:
    """Nobody wants the rest."""
    resuming = resumption()
    resuming.is_cancelled = True
    with pytest.raises(ConnectionLostError, match="gone"):
        cut(resuming, ACCEPTED)
