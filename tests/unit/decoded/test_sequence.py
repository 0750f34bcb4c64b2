"""A request while it is decoded's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from decoded.sequence import Sequence
from decoded.stream import ClientStream
from protocol import messages as wire
from shared.model.answer import Piece
from shared.ops.logprobs import TokenLogprob
from shared.ops.sampling import SamplingParams
from tests.unit.decoded.samples import HANDOFF, changed

NOBODY = cast("ClientStream", SimpleNamespace())


def letter(token_id: int) -> bytes:
    return bytes([token_id])


def adopt(handoff: wire.Handoff) -> tuple[Sequence, Piece]:
    return Sequence.adopt(handoff, stream=NOBODY, token_bytes=letter, block_size=16, adopted_ns=99)


def test_a_sequence_goes_on_where_prefilld_stopped() -> None:
    """The first token was sampled there and is computed here."""
    sequence, piece = adopt(changed(HANDOFF, ids=[65], sampling=wire.Sampling(seed=7)))
    sequence.settle([3, 4], [])
    assert piece.is_empty
    assert (sequence.times.sent_ns, sequence.times.adopted_ns, sequence.lease_id) == (4, 99, 1)
    step = sequence.next_step()
    assert (step.token_id, step.position, step.block_table) == (65, 10, [3, 4])
    assert step.sampling == SamplingParams(temperature=0, top_k=0, top_p=1, seed=7, end_ids=(0,))
    assert step.history is None
    assert sequence.push(66) == Piece(1, [66], "B", None)
    step = sequence.next_step()
    assert (step.token_id, step.position) == (66, 11)
    assert sequence.completion_tokens == 2


def test_resumed_tokens_count_as_computed_and_as_the_answer_s() -> None:
    sequence, piece = adopt(changed(HANDOFF, ids=[65, 66, 67], num_tokens=12, delivered=3))
    assert piece.is_empty
    assert (sequence.next_step().position, sequence.completion_tokens) == (12, 3)


def test_a_step_behind_one_in_flight_takes_its_token_from_there() -> None:
    """The host does not know it yet; the answer's last token is not waited for in vain."""
    sequence, _ = adopt(changed(HANDOFF, ids=[65], max_tokens=3))
    sequence.num_in_flight = 1
    step = sequence.next_step()
    assert (step.token_id, step.position, step.key) == (None, 11, sequence)
    assert sequence.wants_step
    sequence.num_in_flight = 2
    assert not sequence.wants_step, "the two in flight bring the second and the third"


def test_what_the_client_has_not_got_is_sent_at_once() -> None:
    """An unstreamed answer has nothing delivered yet."""
    _, piece = adopt(changed(HANDOFF, ids=[65, 66], num_tokens=11, delivered=0))
    assert piece == Piece(0, [65, 66], "AB", None)


def test_an_answer_ends_by_the_request_s_own_rules() -> None:
    sequence, _ = adopt(changed(HANDOFF, ids=[65], stop_ids=[9], max_tokens=3))
    assert sequence.push(9).finish == "stop"
    sequence, _ = adopt(changed(HANDOFF, ids=[65], max_tokens=3))
    assert sequence.push(66).finish is None
    assert sequence.push(67).finish == "length"
    sequence, _ = adopt(changed(HANDOFF, ids=[65], stop=["BC"]))
    assert sequence.push(66).is_empty, "it may be the beginning of a stop string"
    assert sequence.push(67) == Piece(1, [66, 67], "", "stop")


def test_a_character_cut_by_the_hand_over_is_whole() -> None:
    """Its first byte came from prefilld, where it had to wait."""
    sequence, piece = adopt(changed(HANDOFF, ids=[0xC3], delivered=0, stop_ids=[]))
    assert piece.is_empty
    assert sequence.push(0xA9) == Piece(0, [0xC3, 0xA9], "é", None)


def test_penalties_go_on_from_what_prefilld_counted() -> None:
    """The prompt's tokens come as a set, the answer's as ids."""
    sampling = wire.Sampling(seed=7, repetition_penalty=1.5)
    sequence, _ = adopt(
        changed(HANDOFF, ids=[65], sampling=sampling, prompt_set=bytes(13), min_tokens=2)
    )
    step = sequence.next_step()
    assert step.history is sequence.history is not None
    assert step.history.num_answer_tokens == 1
    assert (step.sampling.min_tokens, step.sampling.end_ids) == (2, (0,))


def test_probabilities_leave_with_their_ids() -> None:
    """They wait with an id whose text is half a character, also one that prefilld sampled."""
    held = wire.TokenLogprob(logprob=-0.5, top_ids=[], top_logprobs=[])
    sequence, piece = adopt(
        changed(HANDOFF, ids=[0xC3], delivered=0, stop_ids=[], logprobs=1, held_logprobs=[held])
    )
    assert sequence.history is not None
    assert sequence.history.num_logprobs == 1
    assert sequence.take_logprobs(piece) == []
    sequence.history.logprobs.append(TokenLogprob(-1.5, ((3, -0.25),)))
    piece = sequence.push(0xA9)
    assert sequence.take_logprobs(piece) == [
        held,
        wire.TokenLogprob(logprob=-1.5, top_ids=[3], top_logprobs=[-0.25]),
    ]


def test_a_request_that_did_not_ask_is_told_no_probabilities() -> None:
    sequence, piece = adopt(changed(HANDOFF, ids=[65]))
    assert sequence.take_logprobs(piece) is None
    assert sequence.take_logprobs(sequence.push(66)) is None
