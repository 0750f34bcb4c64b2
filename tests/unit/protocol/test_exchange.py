"""The client's side of a request without a socket: checks, resume, and early ends."""

from __future__ import annotations

import math

import pytest

from protocol import messages as m
from protocol.codec import encode_message
from protocol.errors import ConnectionLostError, InvalidMessageError, RequestError
from protocol.exchange import AnswerBuilder, Exchange, Options, request_message
from tests.unit.protocol.samples import RESUME, SAMPLES


def accepted_exchange(resume: m.Resume | None = None) -> Exchange:
    exchange = Exchange(m.Generate(prompt="x", resume=resume))
    exchange.begin()
    exchange.receive_data(encode_message(SAMPLES[m.Accepted]))
    assert exchange.next_event() == SAMPLES[m.Accepted]
    return exchange


def tokens(index: int, *ids: int) -> bytes:
    return encode_message(m.Tokens(index=index, ids=list(ids), text="t" * len(ids)))


@pytest.mark.parametrize(
    "prompt",
    ["text", [1, 2, 3], (1, 2, 3), [m.ChatMessage(role="user", content="Why?")]],
    ids=["text", "ids", "tuple", "chat"],
)
def test_a_prompt_is_text_or_ids_or_chat(prompt: str | list[int]) -> None:
    """Any sequence will do; on the wire it is a list."""
    request = request_message(m.Generate, prompt, {"stop": ("\n",), "max_tokens": 3})
    assert request.prompt == (prompt if isinstance(prompt, str) else list(prompt))
    assert (request.stop, request.max_tokens) == (["\n"], 3)
    assert isinstance(request_message(m.Check, prompt, {}), m.Check)


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("", {"max_tokens": 0}, r"at `\$.max_tokens`"),
        ("x", {"sampling": m.Sampling(temperature=math.nan)}, r"at `\$.sampling.temperature`"),
        ("x", {"heat": 1}, "unknown field `heat`"),
        ("x", {"seed": 1}, "unknown field `seed`"),
        ([], {}, "`prompt` is an empty list"),
        (object(), {}, "object"),
    ],
)
def test_a_wrong_request_is_told_before_anything_is_sent(
    prompt: str, options: Options, text: str
) -> None:
    """The error is the one that the daemon would answer with."""
    with pytest.raises(RequestError, match=text) as caught:
        request_message(m.Generate, prompt, options)
    assert (caught.value.code, caught.value.retryable) == ("invalid-request", False)


def test_text_that_is_no_unicode_is_an_invalid_request() -> None:
    """A shell's undecodable bytes arrive as lone surrogates."""
    with pytest.raises(RequestError, match="surrogates not allowed"):
        Exchange(m.Generate(prompt="\udcff")).begin()


def test_a_cut_answer_tells_what_was_delivered_and_how_to_go_on() -> None:
    """No token is lost or doubled: `resume` holds exactly what next_event returned."""
    exchange = accepted_exchange()
    exchange.receive_data(tokens(0, 5, 6) + tokens(2, 7) + tokens(3, 8)[:-1])
    exchange.receive_data(b"")
    while True:
        try:
            exchange.next_event()
        except ConnectionLostError as error:
            lost = error
            break
    assert "tokens delivered: 3" in str(lost)
    assert lost.num_tokens == 3
    assert lost.resume == m.Resume(attempt=1, seed=1, fingerprint="f", ids=[5, 6, 7])


def test_a_resumed_answer_that_is_cut_again_resumes_behind_both_parts() -> None:
    """Attempts are counted, ids add up."""
    exchange = accepted_exchange(resume=RESUME)
    exchange.receive_data(tokens(1, 43))
    exchange.next_event()
    assert exchange.resume == m.Resume(attempt=2, seed=1, fingerprint="f", ids=[42, 43])


def test_before_accepted_there_is_nothing_to_resume() -> None:
    """No seed is known, so the request is simply sent again."""
    exchange = Exchange(m.Generate(prompt="x"))
    exchange.begin()
    exchange.receive_data(b"")
    with pytest.raises(ConnectionLostError, match="tokens delivered: 0") as caught:
        exchange.next_event()
    assert caught.value.resume is None
    assert caught.value.retryable


@pytest.mark.parametrize("index", [0, 1, 3])
def test_a_gap_or_an_overlap_in_the_tokens_is_a_fault(index: int) -> None:
    """A doubled or lost token must not pass for an answer."""
    exchange = accepted_exchange()
    exchange.receive_data(tokens(0, 5, 6) + tokens(index, 7))
    exchange.next_event()
    with pytest.raises(InvalidMessageError, match=f"begin at index {index}, but 2 were"):
        exchange.next_event()


def test_an_error_frame_becomes_a_request_error() -> None:
    """With everything that the daemon said."""
    exchange = Exchange(m.Generate(prompt="x"))
    exchange.begin()
    exchange.receive_data(encode_message(SAMPLES[m.Error]))
    with pytest.raises(RequestError, match="come back later") as caught:
        exchange.next_event()
    error = caught.value
    assert (error.code, error.retryable, error.retry_after_ms) == ("busy", True, 250)


def test_cancel_is_sent_only_where_something_runs() -> None:
    """Before, after, or for a STATUS there is nothing to cancel, and that is no error."""
    exchange = accepted_exchange()
    assert exchange.cancel() == encode_message(m.Cancel())
    exchange.receive_data(encode_message(SAMPLES[m.End]))
    exchange.next_event()
    assert exchange.cancel() == b""
    assert Exchange(m.StatusRequest()).cancel() == b""


def test_an_answer_is_folded_from_its_events() -> None:
    """The first token's time counts from when the client began."""
    builder = AnswerBuilder(began_s=10.0)
    events = [
        SAMPLES[m.Accepted],
        m.Tokens(index=0, ids=[1], text="a"),
        m.Tokens(index=1, ids=[2, 3], text="bc"),
        SAMPLES[m.End],
    ]
    for second, event in enumerate(events, start=11):
        builder.add(event, now_s=float(second))  # type: ignore[arg-type]
    answer = builder.finish()
    assert (answer.ids, answer.text, answer.reason) == ((1, 2, 3), "abc", "stop")
    assert (answer.id, answer.seed, answer.fingerprint) == ("r-1", 1, "f")
    assert answer.ttft_ms == 2000.0


def test_an_answer_without_tokens_has_no_first_one() -> None:
    """None, and not a made-up number."""
    builder = AnswerBuilder(began_s=0.0)
    builder.add(SAMPLES[m.Accepted], now_s=1.0)  # type: ignore[arg-type]
    builder.add(SAMPLES[m.End], now_s=2.0)  # type: ignore[arg-type]
    assert builder.finish().ttft_ms is None


def test_an_answer_has_the_probabilities_of_its_tokens() -> None:
    """In the order of the ids, over all frames."""
    likely = [
        m.TokenLogprob(logprob=-float(index), top_ids=[index], top_logprobs=[-0.5])
        for index in range(3)
    ]
    builder = AnswerBuilder(began_s=0.0)
    builder.add(SAMPLES[m.Accepted], now_s=1.0)  # type: ignore[arg-type]  # they are events
    builder.add(m.Tokens(index=0, ids=[4, 5], text="ab", logprobs=likely[:2]), now_s=1.0)
    builder.add(m.Tokens(index=2, ids=[6], text="c", logprobs=likely[2:]), now_s=1.0)
    builder.add(SAMPLES[m.End], now_s=1.0)  # type: ignore[arg-type]
    assert builder.finish().logprobs == tuple(likely)
