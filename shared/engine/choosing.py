"""From a step's logits to its tokens: bias and penalties, then the choice, then how likely it was.

A row that has none of these pays for none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shared.engine.history import adjustments_of
from shared.ops.adjustments import adjust_logits
from shared.ops.batch_sampling import SamplingTensors, sample_batch
from shared.ops.logprobs import TokenLogprob, token_logprobs
from shared.ops.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.ops.sampling import SamplingParams


class Chosen(NamedTuple):
    """What became of some rows of logits."""

    token_ids: Tensor
    """[num_rows] int64, on the logits' device."""
    logprobs: list[TokenLogprob | None]
    """One a row, where the row asked."""


def is_plain(step: SequenceStep) -> bool:
    """Whether the likeliest token is all that is wanted of a step that samples."""
    assert step.sampling is not None
    return step.sampling.is_greedy and step.history is None and step.num_logprobs is None


def choose_tokens(logits: Tensor, steps: Sequence[SequenceStep]) -> Chosen:
    """Choose each sequence's next token, and note it in its history.

    Args:
        logits: [num_rows, vocab_size] float32; changed by this.
        steps: One a row, each with its parameters.

    Nothing waits for the device unless some row asked for logarithms of probabilities.
    """
    vocab_size = logits.shape[1]
    told = [row for row, step in enumerate(steps) if step.num_logprobs is not None]
    own = logits[told] if told else None  # the model's own, before anything changes them
    adjusted = [row for row, step in enumerate(steps) if step.history is not None]
    histories = [step.history for step in steps if step.history is not None]
    if adjusted:
        rows = logits[adjusted]
        adjust_logits(rows, adjustments_of(histories, vocab_size, logits.device))
        logits[adjusted] = rows
    token_ids = _draw(logits, steps)
    for row, history in zip(adjusted, histories, strict=True):
        history.record(token_ids[row])
    logprobs: list[TokenLogprob | None] = [None] * len(steps)
    if own is not None:
        wanted = [min(steps[row].num_logprobs or 0, vocab_size) for row in told]
        likely = token_logprobs(own, token_ids[told], num_top=max(wanted))
        for index, (row, num_top) in enumerate(zip(told, wanted, strict=True)):
            logprobs[row] = likely.row(index, num_top)
    return Chosen(token_ids, logprobs)


def _draw(logits: Tensor, steps: Sequence[SequenceStep]) -> Tensor:
    sampling: list[SamplingParams] = []
    for step in steps:
        assert step.sampling is not None
        sampling.append(step.sampling)
    positions = [step.context_len for step in steps]
    if logits.device.type == "cpu":
        return sample(logits, sampling, positions)
    how = SamplingTensors.of(sampling, logits.device)
    return sample_batch(logits, how, torch.tensor(positions).to(logits.device, non_blocking=True))
