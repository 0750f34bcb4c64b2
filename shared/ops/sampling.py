"""Chooses the next token: greedy, or by temperature, top-k, top-p, min-p and reproducible noise.

The order and the meaning of these four are those of transformers.  A token is then drawn by the
Gumbel-max trick: the largest `logit + noise` wins, which draws from the softmax of the logits.
The noise is keyed by (seed, position, vocabulary index), so the choice depends on the row alone:
the same seed gives the same answer in any batch and in either daemon.

What two logits tie for is decided by value, never by the order that some sort left them in:
tokens that tie at the edge of top-k or top-p are all kept, and a tie for the first place goes to
the lowest id.

`sample` goes row by row and gives noise only to tokens that could win, which is what a CPU wants;
`shared.ops.batch_sampling` does the same for a whole batch without ever asking the device back.
Bias and penalties change the logits beforehand: `shared.ops.adjustments`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError
from shared.ops.philox import UNIFORM_BITS, uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MAX_SEED = (1 << 64) - 1

# uniform() stays 2^-24 away from 0 and from 1, so the noise lies between -2.82 and 16.64.
_EDGE = 2.0 ** -(UNIFORM_BITS + 1)
NOISE_SPAN = -math.log(-math.log1p(-_EDGE)) + math.log(-math.log(_EDGE))
"""Largest less smallest noise: a logit that far below the best one can never win."""
NOISE_SPAN_SLACK = 1e-2
"""What float32 rounding could add to `NOISE_SPAN`, with room."""

FIRST_NUCLEUS = 1024
"""Tokens sorted at first for top-p: nearly always enough, and 8 times cheaper than all 49k."""
NUCLEUS_GROWTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Temperature 0 is greedy: top-k, top-p, min-p and the seed are ignored then, while bias and
    penalties still say what is likeliest.

    Raises:
        ValueError: A field is out of its range.
    """

    temperature: float = 0.0
    """At least 0, finite."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, as a share of the likeliest one's probability."""
    seed: int = 0
    """In [0, 2^64)."""
    repetition_penalty: float = 1.0
    """Above 0; logits of tokens in prompt or answer are divided by it, or multiplied below 0."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the answer has."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit as often as the answer has it."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), each id once; -inf forbids a token."""
    min_tokens: int = 0
    """`end_ids` are not sampled before the answer has so many tokens."""
    end_ids: tuple[int, ...] = ()
    """Tokens that end the answer, each once; used for `min_tokens` alone."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be finite and at least 0")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; it must be at least 0 and at most 1")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed is {self.seed}; it must be a 64-bit unsigned number")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}; it must be finite and above 0"
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(value := getattr(self, name)):
                raise ValueError(f"{name} is {value}; it must be finite")
        if any(math.isnan(bias) or bias == math.inf for _, bias in self.logit_bias):
            raise ValueError("logit_bias is NaN or infinite for a token; it must be below infinity")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be at least 0")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0

    @property
    def is_penalised(self) -> bool:
        """Whether what was said before changes what is likely."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_adjusted(self) -> bool:
        """Whether logits are changed before anything is chosen from them."""
        return self.is_penalised or bool(self.logit_bias) or self.min_tokens > 0


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose one token for every row.

    Rows are computed one by one: each keeps another number of candidates, and a row must not
    feel its neighbours.

    Args:
        logits: [batch, vocab_size] float32, on the CPU.
        params: One a row.
        positions: One a row: the position in the sequence that the new token will have.

    Returns:
        [batch] int64.

    Raises:
        ShapeError: Rows, parameters and positions are not equally many.
    """
    if not logits.shape[0] == len(params) == len(positions):
        raise ShapeError(
            f"{logits.shape[0]} rows, {len(params)} parameters and {len(positions)} positions"
        )
    return torch.tensor(
        [
            int(row.argmax()) if how.is_greedy else _draw(row, how, position)
            for row, how, position in zip(logits, params, positions, strict=True)
        ],
        dtype=torch.int64,
    )


def candidates(logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the tokens that temperature, top-k, top-p and min-p leave in the draw.

    Args:
        logits: [vocab_size] float32, -inf for what is forbidden.
        params: Not greedy.

    Returns:
        Ids, ascending, and their logits divided by the temperature, the best one being 0: two
        tensors of one length, at least 1.
    """
    # Measured from the best one, so that a tiny temperature does not overflow.
    scaled = (logits - logits.max()) / params.temperature
    ids = torch.arange(scaled.shape[0], device=scaled.device)
    if 0 < params.top_k < scaled.shape[0]:
        ids, scaled = _keep(scaled >= scaled.topk(params.top_k).values[-1], ids, scaled)
    if params.top_p < 1:
        # Probabilities are those among what top-k left.
        ids, scaled = _keep(scaled >= _nucleus_edge(scaled, params.top_p), ids, scaled)
    if params.min_p > 0:
        # The best one is 0, so a scaled logit is the logarithm of its share of the best one.
        ids, scaled = _keep(scaled >= math.log(params.min_p), ids, scaled)
    return ids, scaled


def _draw(logits: Tensor, params: SamplingParams, position: int) -> int:
    ids, scaled = candidates(logits, params)
    # Noise costs far more than a comparison, so those that cannot win get none.
    ids, scaled = _keep(scaled >= -(NOISE_SPAN + NOISE_SPAN_SLACK), ids, scaled)
    noise = uniform(ids, position=position, seed=params.seed).log_().neg_().log_().neg_()
    return int(ids[noise.add_(scaled).argmax()])


def _keep(kept: Tensor, ids: Tensor, scaled: Tensor) -> tuple[Tensor, Tensor]:
    (where,) = kept.nonzero(as_tuple=True)
    return ids[where], scaled[where]


def _nucleus_edge(scaled: Tensor, top_p: float) -> Tensor:
    """Return the smallest scaled logit in the nucleus.

    A token is in it when the tokens likelier than itself have less than `top_p` together, so the
    likeliest always is.
    """
    num_all = scaled.shape[0]
    total = scaled.exp().sum()
    num_sorted = min(FIRST_NUCLEUS, num_all)
    while True:
        sorted_ = scaled.topk(num_sorted).values
        probabilities = sorted_.exp() / total
        likelier = probabilities.cumsum(-1, dtype=torch.float64) - probabilities
        num_inside = int((likelier < top_p).sum())
        if num_inside < num_sorted or num_sorted == num_all:
            return sorted_[num_inside - 1]
        num_sorted = min(num_sorted * NUCLEUS_GROWTH, num_all)
