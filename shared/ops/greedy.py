"""The likeliest token, exactly, without reading the whole output matrix.

At batch 1 a decode step is bound by the bytes of its weights, and a fifth of them are the output
matrix's.  So the scores are first computed roughly, from 8-bit copies of the matrix and of the
hidden state, together with a bound on how wrong each can be; only tokens that could still be the
best one are then scored from the float32 weights.  For SmolLM2 that is 58 of 49,152 at the median.

The bound.  Let a weight row be `w = s·q + e` and the hidden state `h = t·p + d`, with integers
`q`, `p`.  Then `h·w = t·s·(p·q) + (t·p)·e + d·w`, and by Cauchy and Schwarz the last two terms are
at most `‖t·p‖·‖e‖ + ‖d‖·‖w‖`.  The integer product is exact: `127² · hidden_size` stays far
below 2³¹.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_INT8 = 127

ROWS_A_RUN = 1024
"""Rows that are rounded at once: some MiB of scratch."""

ROUNDING_SLACK = 1e-4
"""Share of a bound, and of a logit, that float32 rounding may add; about 1e-6 is possible."""

MAX_SHARE_RESCORED = 1 / 8
"""Above this share of the vocabulary the whole product costs less than gathering its rows."""


class GreedyHead:
    """Chooses the token of the largest logit.

    Args:
        weight: [vocab_size, hidden_size] float32, on the CPU; kept, not copied.  The 8-bit copy
            takes a quarter of it again.
    """

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        vocab_size = weight.shape[0]
        self._scale, self._weight_norm, self._error_norm = torch.empty(3, vocab_size).unbind(0)
        rough_rows = torch.empty(weight.shape, dtype=torch.int8)
        # In runs: whole, the float32 scratch would be several times the matrix itself.
        for start in range(0, vocab_size, ROWS_A_RUN):
            run = slice(start, start + ROWS_A_RUN)
            rows = weight[run]
            scale = (rows.abs().amax(1) / LARGEST_INT8).clamp_(min=torch.finfo(torch.float32).tiny)
            rough = (rows / scale.unsqueeze(1)).round_()
            self._scale[run] = scale
            self._weight_norm[run] = torch.linalg.vector_norm(rows, dim=1)
            rough_rows[run] = rough
            errors = rows - rough.mul_(scale.unsqueeze(1))
            self._error_norm[run] = torch.linalg.vector_norm(errors, dim=1)
        # The library's integer product is fast for [rows, hidden] x [hidden, vocab] where the
        # second one is a transposed view of a row-major matrix.
        self._rough = rough_rows.t()

    def argmax(self, hidden: Tensor) -> Tensor:
        """Return the id of each row's largest logit; a tie goes to the lowest id.

        Args:
            hidden: [num_rows, hidden_size] float32, what the logits are computed from.

        Returns:
            [num_rows] int64.
        """
        step = hidden.abs().amax(1, keepdim=True) / LARGEST_INT8
        whole = (hidden / step).round_()
        near = whole * step
        products = torch._int_mm(whole.to(torch.int8), self._rough)  # noqa: SLF001  no public name
        chosen = [
            self._rescore(
                hidden[row],
                products[row].float().mul_(self._scale * step[row]),
                near_norm=float(near[row].norm()),
                rest_norm=float((hidden[row] - near[row]).norm()),
            )
            for row in range(hidden.shape[0])
        ]
        return torch.stack(chosen)

    def _rescore(
        self, hidden: Tensor, rough: Tensor, *, near_norm: float, rest_norm: float
    ) -> Tensor:
        """Return the best token, given [vocab_size] rough logits of one row."""
        bound = near_norm * self._error_norm + rest_norm * self._weight_norm
        bound.add_(rough.abs() + bound, alpha=ROUNDING_SLACK)
        best_at_least = (rough - bound).max()
        (candidates,) = (rough + bound >= best_at_least).nonzero(as_tuple=True)
        num_candidates = candidates.shape[0]
        # None at all: the hidden state is not finite, and the whole product shows it.
        if not 0 < num_candidates <= MAX_SHARE_RESCORED * rough.shape[0]:
            return functional.linear(hidden, self._weight).argmax()
        logits = functional.linear(hidden, self._weight[candidates])
        best: Tensor = candidates[logits.argmax()]
        return best
