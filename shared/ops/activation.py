"""The gate of a gated feed-forward layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) · up` for gate and up lying side by side, as one product made them.

    Args:
        gate_up: [num_tokens, 2 · intermediate_size]; the first half of a row is the gate.

    Returns:
        [num_tokens, intermediate_size], a new tensor.

    Raises:
        ShapeError: The rows cannot be halved.
    """
    width, odd = divmod(gate_up.shape[-1], 2)
    if odd:
        raise ShapeError(f"rows of {gate_up.shape[-1]} numbers are no gate and up side by side")
    return functional.silu(gate_up[..., :width]).mul_(gate_up[..., width:])
