"""What a sequence's next token depends on beside its logits."""

from __future__ import annotations

import math

import torch

from shared.engine.history import TokenHistory, adjustments_of
from shared.ops.sampling import SamplingParams
from shared.ops.token_bitmap import pack_tokens

CPU = torch.device("cpu")
VOCAB_SIZE = 20


def test_requests_without_penalties_have_no_history() -> None:
    """They must not pay for those that have one."""
    plain = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=3, end_ids=(1,))
    assert TokenHistory.needed_for(plain) is None
    for changes in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": ((3, 1.0),)},
        {"min_tokens": 1},
    ):
        assert TokenHistory.needed_for(SamplingParams(**changes)) is not None  # type: ignore[arg-type]  # one field each


def test_the_answer_is_counted_and_the_prompt_is_a_set() -> None:
    params = SamplingParams(repetition_penalty=1.2)
    history = TokenHistory(params, prompt=pack_tokens([1, 1, 4], VOCAB_SIZE), answer_ids=[5, 5])
    history.counts(VOCAB_SIZE, CPU)
    history.record(torch.tensor(5))
    history.record(torch.tensor(6))
    is_in_prompt, counts = history.counts(VOCAB_SIZE, CPU)
    assert is_in_prompt.nonzero().flatten().tolist() == [1, 4]
    assert {i: int(counts[i]) for i in counts.nonzero().flatten().tolist()} == {5: 3, 6: 1}
    assert history.num_answer_tokens == 4


def test_a_resumed_answer_has_the_history_of_an_undisturbed_one() -> None:
    """Whoever takes it over is told the ids, and counts them anew."""
    params = SamplingParams(frequency_penalty=1.0, min_tokens=3, end_ids=(2,))
    undisturbed = TokenHistory(params, answer_ids=[7])
    undisturbed.counts(VOCAB_SIZE, CPU)
    for token_id in (8, 8):
        undisturbed.record(torch.tensor(token_id))
    resumed = TokenHistory(params, answer_ids=[7, 8, 8])
    for mine, theirs in zip(
        undisturbed.counts(VOCAB_SIZE, CPU), resumed.counts(VOCAB_SIZE, CPU), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert undisturbed.bias() == resumed.bias() == []


def test_ends_are_forbidden_as_long_as_transformers_forbids_them() -> None:
    """`min_new_tokens` other tokens come before the end token may."""
    from transformers import MinNewTokensLengthLogitsProcessor

    prompt_ids, min_tokens, end_id = [3, 4, 5], 2, 9
    theirs = MinNewTokensLengthLogitsProcessor(len(prompt_ids), min_tokens, end_id)
    history = TokenHistory(SamplingParams(min_tokens=min_tokens, end_ids=(end_id,)))
    for num_answer_tokens in range(4):
        ids = torch.tensor([[*prompt_ids, *[6] * num_answer_tokens]])
        scores = theirs(ids, torch.zeros(1, VOCAB_SIZE))
        expected = [(end_id, -math.inf)] if scores[0, end_id] == -math.inf else []
        assert history.bias() == expected
        history.record(torch.tensor(6))


def test_rows_of_different_needs_share_a_batch() -> None:
    """Each is padded to the widest with entries that change nothing."""
    histories = [
        TokenHistory(SamplingParams(logit_bias=((3, 1.0), (4, -2.0)))),
        TokenHistory(SamplingParams(min_tokens=1, end_ids=(2,))),
        TokenHistory(SamplingParams(presence_penalty=1.0), answer_ids=[5]),
    ]
    how = adjustments_of(histories, VOCAB_SIZE, CPU)
    assert how.bias_ids.tolist() == [[3, 4], [2, 0], [0, 0]]
    assert how.bias.tolist() == [[1.0, -2.0], [-math.inf, 0.0], [0.0, 0.0]]
    assert how.penalties is not None
    assert how.penalties.presence.tolist() == [0.0, 0.0, 1.0]
    assert how.penalties.repetition.tolist() == [1.0] * 3
    assert how.penalties.counts[2].nonzero().flatten().tolist() == [5]


def test_without_penalties_nothing_is_counted() -> None:
    """A bias alone costs no table as large as the vocabulary."""
    history = TokenHistory(SamplingParams(logit_bias=((3, 1.0),)))
    assert adjustments_of([history], VOCAB_SIZE, CPU).penalties is None
