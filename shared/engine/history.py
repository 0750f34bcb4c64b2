"""What one sequence has said so far, as far as its next token depends on it.

Only requests with a bias, a penalty or a shortest length have a history; to all others sampling
looks at nothing but the logits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from shared.ops.adjustments import Adjustments, Penalties
from shared.ops.token_bitmap import unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.ops.sampling import SamplingParams


class TokenHistory:
    """One sequence's tokens, counted.  Made anywhere; its tensors belong to the engine thread.

    Args:
        params: The request's parameters.
        prompt: The prompt's tokens as `pack_tokens` makes them; empty where none are penalised.
        answer_ids: The answer so far.
    """

    def __init__(
        self, params: SamplingParams, *, prompt: bytes = b"", answer_ids: Sequence[int] = ()
    ) -> None:
        self.params = params
        self.num_answer_tokens = len(answer_ids)
        self._prompt, self._answer_ids = prompt, answer_ids
        self._is_in_prompt: Tensor | None = None
        self._counts: Tensor | None = None

    @classmethod
    def needed_for(
        cls, params: SamplingParams, *, prompt: bytes = b"", answer_ids: Sequence[int] = ()
    ) -> TokenHistory | None:
        """Return a history, or None where the parameters do not look at any."""
        return cls(params, prompt=prompt, answer_ids=answer_ids) if params.is_adjusted else None

    def record(self, token_id: Tensor) -> None:
        """Take note of the sampled token: [] int64 on the engine's device, which is not read."""
        self.num_answer_tokens += 1
        if self._counts is not None:
            self._counts.index_add_(0, token_id.view(1), self._counts.new_ones(1))

    def bias(self) -> list[tuple[int, float]]:
        """Return what is added to which token's logit for the next token."""
        entries = list(self.params.logit_bias)
        if self.num_answer_tokens < self.params.min_tokens:
            entries += [(token_id, -math.inf) for token_id in self.params.end_ids]
        return entries

    def counts(self, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return which tokens the prompt has and how often the answer has each.

        [vocab_size] bool and int32 on `device`; made at the first call, which comes before the
        first `record` wherever the numbers matter, and kept up to date from then on.
        """
        if self._counts is None or self._is_in_prompt is None:
            self._is_in_prompt = (
                unpack_tokens(self._prompt, vocab_size, device)
                if self._prompt
                else torch.zeros(vocab_size, dtype=torch.bool, device=device)
            )
            ids = torch.tensor(self._answer_ids, dtype=torch.int64)
            self._counts = torch.bincount(ids, minlength=vocab_size).int().to(device)
        return self._is_in_prompt, self._counts


def adjustments_of(
    histories: Sequence[TokenHistory], vocab_size: int, device: torch.device
) -> Adjustments:
    """Return how the logits of some sequences are changed, one row each."""
    biases = [history.bias() for history in histories]
    width = max(map(len, biases))
    padded = [[*entries, *[(0, 0.0)] * (width - len(entries))] for entries in biases]
    return Adjustments(
        bias_ids=torch.tensor(
            [[token_id for token_id, _ in row] for row in padded], dtype=torch.int64
        ).to(device, non_blocking=True),
        bias=torch.tensor([[bias for _, bias in row] for row in padded]).to(
            device, dtype=torch.float32, non_blocking=True
        ),
        penalties=_penalties_of(histories, vocab_size, device),
    )


def _penalties_of(
    histories: Sequence[TokenHistory], vocab_size: int, device: torch.device
) -> Penalties | None:
    params = [history.params for history in histories]
    if not any(how.is_penalised for how in params):
        return None
    in_prompt, counts = zip(
        *(history.counts(vocab_size, device) for history in histories), strict=True
    )

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)

    return Penalties(
        repetition=column([how.repetition_penalty for how in params]),
        presence=column([how.presence_penalty for how in params]),
        frequency=column([how.frequency_penalty for how in params]),
        is_in_prompt=torch.stack(in_prompt),
        counts=torch.stack(counts),
    )
