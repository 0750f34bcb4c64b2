"""CHUNK and HANDOFF say what the request is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from decoded.admittance import check_chunk, check_handoff
from prefilld.clients import Client
from prefilld.handoff_messages import chunk_message, first_step, handoff_message
from prefilld.request import Request
from protocol.codec import validate
from protocol.messages import FirstStep, LogitBias, RequestState, Sampling, TokenLogprob
from shared.kv.layout import KVLayout
from shared.kv.leases import Lease
from tests.unit.prefilld.recorders import BLOCK_SIZE, EPOCH, hold_of, new_request

LAYOUT = KVLayout(
    num_blocks=32, num_layers=1, num_kv_heads=1, block_size=BLOCK_SIZE, head_dim=2, dtype="float32"
)


def request_and_lease() -> tuple[Request, Lease]:
    request = new_request(cast("Client", SimpleNamespace()), num_tokens=10, start_blocks=5)
    request.hold = hold_of([7, 9, 8])
    request.answer_ids, request.delivered = [41], 1
    request.started_ns, request.first_token_ns, request.sent_ns = 2, 3, 4
    lease = Lease(lease_id=3, request_id="r", blocks=(7, 9, 8), slot=1, generation=5)
    return request, lease


def test_a_chunk_names_what_was_completed_since_the_last_one() -> None:
    request, lease = request_and_lease()
    request.chunked_blocks = 1
    chunk = validate(chunk_message(request, lease, EPOCH, num_complete=2, event=5))
    assert (chunk.epoch, chunk.lease, chunk.slot, chunk.generation) == (EPOCH, 3, 1, 5)
    assert (chunk.first, chunk.blocks, chunk.total_blocks) == (1, [9], 5)
    assert chunk.event == 5
    check_chunk(chunk, LAYOUT, num_slots=2, num_events=6)


@pytest.mark.parametrize(
    "prompt",
    [
        {"sampling": Sampling(seed=3, repetition_penalty=1.5)},
        {"sampling": Sampling(seed=3, logit_bias=[LogitBias(id=4, bias=1.0)])},
        {"logprobs": 0},
        {"min_tokens": 3},
        {"max_tokens": 1},
        {"max_tokens": 3, "resumed_ids": [9, 9]},
    ],
)
def test_an_answer_of_which_handoff_must_tell_more_is_not_begun_before(
    prompt: dict[str, object],
) -> None:
    request, _ = request_and_lease()
    assert first_step(dataclasses.replace(request.prompt, **prompt)) is None  # type: ignore[arg-type]


def test_a_chunk_tells_decoded_how_to_begin() -> None:
    request, lease = request_and_lease()
    sampling = Sampling(seed=3, temperature=0.5, top_k=7)
    prompt = dataclasses.replace(request.prompt, sampling=sampling, resumed_ids=[], max_tokens=2)
    step = first_step(prompt)
    assert step == FirstStep(num_tokens=10, sampling=sampling)
    chunk = chunk_message(request, lease, EPOCH, num_complete=3, event=5, first_step=step)
    check_chunk(validate(chunk), LAYOUT, num_slots=2, num_events=6)


def test_a_handoff_tells_everything_that_decoded_must_know() -> None:
    request, lease = request_and_lease()
    handoff = validate(handoff_message(request, lease, EPOCH, residue=b"ab"))
    assert (handoff.epoch, handoff.lease, handoff.slot, handoff.generation) == (EPOCH, 3, 1, 5)
    assert (handoff.blocks, handoff.num_tokens, handoff.total_blocks) == ([7, 9, 8], 10, 5)
    assert (handoff.residue, handoff.sent_ns) == (b"ab", 4)
    assert handoff.request == RequestState(
        id="r",
        prompt_tokens=10,
        cached_tokens=0,
        ids=[41],
        delivered=1,
        resumed=0,
        max_tokens=8,
        sampling=Sampling(seed=1),
        stop=["end"],
        stop_ids=[0],
        stream=True,
        arrived_ns=1,
        started_ns=2,
        first_token_ns=3,
    )
    check_handoff(handoff, LAYOUT, num_slots=2, vocab_size=100)


def test_resumed_ids_are_computed_here_and_told_apart() -> None:
    """They are part of what the blocks hold, and of the answer."""
    request, lease = request_and_lease()
    request.prompt.resumed_ids.extend([50, 51])
    request.token_ids = [*request.prompt.ids, 50, 51]
    request.answer_ids = [50, 51, 41]
    handoff = handoff_message(request, lease, EPOCH, residue=b"")
    assert handoff.num_tokens == 12
    assert (handoff.request.prompt_tokens, handoff.request.resumed) == (10, 2)
    check_handoff(handoff, LAYOUT, num_slots=2, vocab_size=100)


def test_what_sampling_depends_on_goes_along() -> None:
    """Penalties and shortest answers go on in decoded as if nothing had happened."""
    request, lease = request_and_lease()
    request.prompt = dataclasses.replace(
        request.prompt, min_tokens=3, logprobs=2, prompt_set=bytes(13)
    )
    request.delivered = 0
    request.held_logprobs = [TokenLogprob(logprob=-1.0, top_ids=[4], top_logprobs=[-0.5])]
    handoff = validate(handoff_message(request, lease, EPOCH, residue=b""))
    told = handoff.request
    assert (told.min_tokens, told.logprobs, told.prompt_set) == (3, 2, bytes(13))
    assert told.held_logprobs == request.held_logprobs
    check_handoff(handoff, LAYOUT, num_slots=2, vocab_size=100)
