"""What one sequence has said so far, as far as sampling depends on it or is to tell of it.

Only requests with a bias, a penalty, a shortest length or a wish for log-probabilities have a
history; to all others sampling looks at nothing but the logits.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.ops.adjustments import Adjustments, Penalties
from shared.ops.token_bitmap import unpack_tokens
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.ops.logprobs import TokenLogprob
    from shared.ops.sampling import SamplingParams


class TokenHistory:
    """One sequence's tokens, counted.  Made anywhere; what changes it is the engine thread's.

    Args:
        params: The request's parameters.
        num_logprobs: How many of the likeliest tokens to tell with the sampled one's probability;
            None tells neither.
        prompt: The prompt's tokens as `pack_tokens` makes them; empty where none are penalised.
        answer_ids: The answer so far.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        num_logprobs: int | None = None,
        prompt: bytes = b"",
        answer_ids: Sequence[int] = (),
    ) -> None:
        self.params, self.num_logprobs = params, num_logprobs
        self.num_answer_tokens = len(answer_ids)
        """Counts tokens that are sampled, also while the host does not know them yet."""
        self.logprobs: deque[TokenLogprob] = deque()
        """Of the tokens that steps brought, oldest first; whoever takes them takes them out."""
        self._prompt, self._answer_ids = prompt, tuple(answer_ids)
        self._is_in_prompt: Tensor | None = None
        self._counts: Tensor | None = None

    @classmethod
    def needed_for(
        cls,
        params: SamplingParams,
        *,
        num_logprobs: int | None = None,
        prompt: bytes = b"",
        answer_ids: Sequence[int] = (),
    ) -> TokenHistory | None:
        """Return a history, or None where nothing looks at it.  Arguments as for the class."""
        if not params.is_adjusted and num_logprobs is None:
            return None
        return cls(params, num_logprobs=num_logprobs, prompt=prompt, answer_ids=answer_ids)

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
            counted = np.bincount(np.array(self._answer_ids, np.int64), minlength=vocab_size)
            self._counts = to_device(counted.astype(np.int32), device)
        return self._is_in_prompt, self._counts


def adjustments_of(
    histories: Sequence[TokenHistory], vocab_size: int, device: torch.device
) -> Adjustments:
    """Return how the logits of some sequences are changed, one row each."""
    biases = [history.bias() for history in histories]
    width = max(map(len, biases))
    bias_ids = np.zeros((len(biases), width), dtype=np.int64)
    bias = np.zeros((len(biases), width), dtype=np.float32)
    for row, entries in enumerate(biases):
        for place, (token_id, value) in enumerate(entries):
            bias_ids[row, place], bias[row, place] = token_id, value
    return Adjustments(
        bias_ids=to_device(bias_ids, device),
        bias=to_device(bias, device),
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
    columns = np.array(
        [(how.repetition_penalty, how.presence_penalty, how.frequency_penalty) for how in params],
        dtype=np.float32,
    )
    repetition, presence, frequency = to_device(columns, device).unbind(1)
    return Penalties(
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        is_in_prompt=torch.stack(in_prompt),
        counts=torch.stack(counts),
    )
