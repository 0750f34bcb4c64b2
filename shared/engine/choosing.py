"""From a step's logits to its tokens: bias and penalties, then the choice, then how likely it was.

A row that has none of these pays for none of them, and nothing here waits for the device: what a
step has to tell beside its tokens stays there until the host looks at the tokens themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from shared.engine.history import adjustments_of
from shared.ops.adjustments import adjust_logits
from shared.ops.batch_sampling import SamplingTensors
from shared.ops.logprobs import LogprobTensors, token_logprobs
from shared.ops.sampler import sampler_for
from shared.ops.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.history import TokenHistory
    from shared.ops.sampling import SamplingParams


class Choice(Protocol):
    """What a step says about the token that one sequence gets."""

    @property
    def sampling(self) -> SamplingParams | None:
        """How to choose; not None where a token is chosen."""

    @property
    def history(self) -> TokenHistory | None:
        """What was said so far, where sampling looks at it or tells of it."""

    @property
    def context_len(self) -> int:
        """The position that the token will have."""


class Told:
    """How likely some rows' tokens were, on its way to the rows' histories."""

    def __init__(self, histories: Sequence[TokenHistory], likely: LogprobTensors) -> None:
        self._histories, self._likely = histories, likely

    def fetch(self, copy: Callable[[Tensor], Tensor]) -> None:
        """Replace the tensors by what `copy` makes of each: one in memory that the host reads."""
        self._likely = LogprobTensors(*map(copy, self._likely))

    def settle(self) -> None:
        """Write into the histories; once, and only after the step was done."""
        vocab_top = self._likely.top.shape[1]
        for row, history in enumerate(self._histories):
            num_top = min(history.num_logprobs or 0, vocab_top)
            history.logprobs.append(self._likely.row(row, num_top))


class Chosen(NamedTuple):
    """What became of some rows of logits."""

    token_ids: Tensor
    """[num_rows] int64, on the logits' device."""
    told: Told | None
    """None where no row asked."""


def is_plain(choice: Choice) -> bool:
    """Whether the likeliest token is all that is wanted."""
    return choice.sampling is not None and choice.sampling.is_greedy and choice.history is None


def choose_tokens(logits: Tensor, choices: Sequence[Choice]) -> Chosen:
    """Choose each row's token, and note it in its history.

    Args:
        logits: [num_rows, vocab_size] float32; changed by this.
        choices: One a row, each with its parameters.

    Enqueues on the current stream and never waits for the device.
    """
    asked = [
        (row, choice.history)
        for row, choice in enumerate(choices)
        if choice.history is not None and choice.history.num_logprobs is not None
    ]
    own = logits[[row for row, _ in asked]] if asked else None  # before anything changes them
    adjusted = [
        (row, choice.history)
        for row, choice in enumerate(choices)
        if choice.history is not None and choice.history.params.is_adjusted
    ]
    if adjusted:
        rows = [row for row, _ in adjusted]
        histories = [history for _, history in adjusted]
        changed = logits if len(rows) == len(choices) else logits[rows]
        adjust_logits(changed, adjustments_of(histories, logits.shape[1], logits.device))
        if changed is not logits:
            logits[rows] = changed
    token_ids = _draw(logits, choices)
    for row, history in adjusted:
        history.record(token_ids[row])
    if own is None:
        return Chosen(token_ids, None)
    told = [history for _, history in asked]
    most = max(history.num_logprobs or 0 for history in told)
    likely = token_logprobs(
        own, token_ids[[row for row, _ in asked]], num_top=min(most, logits.shape[1])
    )
    return Chosen(token_ids, Told(told, likely))


def _draw(logits: Tensor, choices: Sequence[Choice]) -> Tensor:
    sampling: list[SamplingParams] = []
    for choice in choices:
        assert choice.sampling is not None, "a row without parameters is not chosen from"
        sampling.append(choice.sampling)
    positions = [choice.context_len for choice in choices]
    if logits.device.type == "cpu":
        return sample(logits, sampling, positions)
    how = SamplingTensors.of(sampling, positions, logits.device)
    return sampler_for(logits.device)(logits, how)
