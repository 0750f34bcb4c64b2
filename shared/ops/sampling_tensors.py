"""Sampling parameters as tensors of fixed address, one entry a row, for steps in a CUDA graph.

A graph keeps these tensors; a step is prepared by writing into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shared.ops.errors import ShapeError
from shared.ops.sampling import SamplingParams
from shared.ops.sampling import sample as sample_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

WORD = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SamplingTensors:
    """One entry a row of logits; `SamplingParams` says what each means."""

    temperatures: Tensor
    """[batch] float32; 0 is greedy."""
    top_ks: Tensor
    """[batch] int32; 0 keeps all."""
    top_ps: Tensor
    """[batch] float32; 1 keeps all."""
    seeds: Tensor
    """[batch] int64, the bits of an unsigned number."""
    positions: Tensor
    """[batch] int64: the position in the sequence that the new token will have."""

    @classmethod
    def greedy(cls, batch: int, device: torch.device | str) -> SamplingTensors:
        """Return tensors for so many rows, all of them greedy."""
        return cls(
            temperatures=torch.zeros(batch, dtype=torch.float32, device=device),
            top_ks=torch.zeros(batch, dtype=torch.int32, device=device),
            top_ps=torch.ones(batch, dtype=torch.float32, device=device),
            seeds=torch.zeros(batch, dtype=torch.int64, device=device),
            positions=torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def fill(self, params: Sequence[SamplingParams]) -> None:
        """Write the parameters of the first rows, in place; positions are left as they are.

        For when requests come and go: it copies from pageable host memory.
        """
        count = len(params)
        signed = [p.seed - WORD if p.seed >= WORD // 2 else p.seed for p in params]
        for tensor, values in (
            (self.temperatures, [p.temperature for p in params]),
            (self.top_ks, [min(p.top_k, torch.iinfo(torch.int32).max) for p in params]),
            (self.top_ps, [p.top_p for p in params]),
            (self.seeds, signed),
        ):
            tensor[:count] = torch.tensor(values, dtype=tensor.dtype)

    def check(self, logits: Tensor) -> None:
        """Raise ShapeError unless these are for such logits."""
        batch = logits.shape[0]
        if logits.dtype is not torch.float32:
            raise ShapeError(f"logits must be float32, not {logits.dtype}")
        for name, dtype in _DTYPES.items():
            tensor: Tensor = getattr(self, name)
            if tensor.shape != (batch,) or tensor.dtype is not dtype or not tensor.is_contiguous():
                raise ShapeError(
                    f"{name} must be {dtype} of {batch} rows, not {tensor.dtype} {[*tensor.shape]}"
                )


_DTYPES = {
    "temperatures": torch.float32,
    "top_ks": torch.int32,
    "top_ps": torch.float32,
    "seeds": torch.int64,
    "positions": torch.int64,
}


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Choose one token for every row; the reference, which reads the parameters on the host.

    Args:
        logits: [batch, vocab_size] float32.
        params: As many rows.

    Returns:
        [batch] int64.

    Raises:
        ShapeError: A shape or a dtype is not as above.
    """
    params.check(logits)
    rows = [
        SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed % WORD)
        for temperature, top_k, top_p, seed in zip(
            params.temperatures.tolist(),
            params.top_ks.tolist(),
            params.top_ps.tolist(),
            params.seeds.tolist(),
            strict=True,
        )
    ]
    chosen = sample_rows(logits.cpu(), rows, params.positions.tolist())
    return chosen.to(logits.device)
