"""Exactly once, wherever connections break: no token is lost, doubled or changed."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.codec import encode_message
from protocol.errors import ConnectionLostError, NoSuchSocketError
from protocol.exchange import Exchange
from protocol.resuming import ResumePolicy, Resumption

USAGE = m.Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1)
TIMINGS = m.Timings(queue=0, prefill=0, decode=0, total=0)
END = m.End(reason="stop", usage=USAGE, timings_ms=TIMINGS)


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one connection."""

    num_bytes: int | None
    """How much of the rest of the answer gets through; None: all of it."""
    run: int
    """Tokens a frame."""
    num_refusals: int
    """Attempts to connect that find nobody before it."""


fates = st.builds(
    Fate,
    num_bytes=st.one_of(st.none(), st.integers(0, 600)),
    run=st.integers(1, 5),
    num_refusals=st.integers(0, 3),
)


def reply(request: m.Generate, answer: list[int], run: int) -> bytes:
    """Return all that a daemon says to a request: the rest of the answer behind what it brings."""
    had = [] if request.resume is None else request.resume.ids
    assert answer[: len(had)] == had, "the daemon would go on behind tokens that it never sampled"
    frames = encode_message(
        m.Accepted(id="r", seed=7, prompt_tokens=1, cached_tokens=0, fingerprint="f")
    )
    for start in range(len(had), len(answer), run):
        ids = answer[start : start + run]
        text = "".join(f"<{token_id}>" for token_id in ids)
        frames += encode_message(m.Tokens(index=start, ids=ids, text=text))
    return frames + encode_message(END)


def request_of(exchange: Exchange) -> m.Generate:
    request = exchange._request
    assert isinstance(request, m.Generate)
    return request


@given(
    answer=st.lists(st.integers(0, 9), max_size=20),
    connections=st.lists(fates, max_size=3),
)
def test_a_client_gets_the_answer_once(answer: list[int], connections: list[Fate]) -> None:
    """Cut anywhere, in mid-frame too, up to three times, with nobody there in between."""
    resuming = Resumption(m.Generate(prompt=[1]), ResumePolicy(), chance=lambda: 0.5)
    ids: list[int] = []
    text, kinds, now_s = "", [], 0.0
    for number, fate in enumerate([*connections, Fate(num_bytes=None, run=3, num_refusals=0)]):
        if number:
            for _ in range(fate.num_refusals):
                resuming.next_exchange()
                now_s += resuming.failed(NoSuchSocketError("none", path="/s"), now_s=now_s)
        exchange = resuming.next_exchange()
        exchange.begin()
        exchange.receive_data(reply(request_of(exchange), answer, fate.run)[: fate.num_bytes])
        exchange.receive_data(b"")
        try:
            while not kinds or kinds[-1] is not m.End:
                message = exchange.next_event()
                assert message is not None
                event = resuming.take(message)
                if event is None:
                    continue
                kinds.append(type(event))
                if isinstance(event, m.Tokens):
                    ids += event.ids
                    text += event.text
        except ConnectionLostError as error:
            now_s += resuming.failed(error, now_s=now_s)
        else:
            break
    assert ids == answer
    assert text == "".join(f"<{token_id}>" for token_id in answer)
    assert kinds[0] is m.Accepted
    assert kinds[-1] is m.End
    assert kinds.count(m.Accepted) == 1
