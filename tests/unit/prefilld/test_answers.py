"""What prefilld tells a client, in the client's units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from prefilld.answers import end_of, piece_message
from prefilld.clients import Client
from protocol.codec import validate
from protocol.messages import DeviceTimings, Timings, Tokens, Usage
from shared.model.answer import Piece
from tests.unit.prefilld.recorders import new_request

MS = 1_000_000
NOBODY = cast("Client", SimpleNamespace())


def test_a_piece_is_told_as_tokens() -> None:
    assert piece_message(Piece(3, [5, 6], "ab", None)) == Tokens(index=3, ids=[5, 6], text="ab")


def test_an_end_tells_where_the_time_went() -> None:
    request = new_request(NOBODY, num_tokens=10, arrived_ns=10 * MS)
    request.started_ns, request.first_token_ns = 12 * MS, 15 * MS
    request.answer_ids = [1]
    end = validate(end_of(request, "stop", 19 * MS))
    assert end.reason == "stop"
    assert end.usage == Usage(prompt_tokens=10, cached_tokens=0, completion_tokens=1)
    assert end.timings_ms == Timings(queue=2, prefill=3, decode=4, total=9, first_token_ns=15 * MS)


def test_stages_that_were_not_reached_take_no_time() -> None:
    """It was cancelled while it waited; all of it was queueing."""
    request = new_request(NOBODY, arrived_ns=10 * MS)
    end = validate(end_of(request, "cancelled", 19 * MS))
    assert end.timings_ms == Timings(queue=9, prefill=0, decode=0, total=9)
    request.started_ns = 12 * MS
    end = validate(end_of(request, "cancelled", 19 * MS))
    assert end.timings_ms == Timings(queue=2, prefill=7, decode=0, total=9)


def test_what_a_prompt_took_the_gpu_is_told_where_it_had_one() -> None:
    """Also of an answer that nobody had to be handed."""
    request = new_request(NOBODY, arrived_ns=10 * MS)
    request.prefill_device_ns = 3 * MS
    end = validate(end_of(request, "stop", 19 * MS))
    assert end.timings_ms.device == DeviceTimings(prefill=3)
