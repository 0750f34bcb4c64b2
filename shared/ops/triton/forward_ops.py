"""The table of `shared.ops.forward_ops` for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from shared.ops.attention import paged_attention
from shared.ops.errors import ShapeError
from shared.ops.norm import rms_norm as reference_rms_norm
from shared.ops.rotary import rotary_angles
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.decode_attention import DecodeAttention
from shared.ops.triton.norm import rms_norm
from shared.ops.triton.rope_kv_write import rope_kv_write

if TYPE_CHECKING:
    from shared.ops.pool_pair import PoolPair


class TritonOps:
    """Triton kernels, and cuBLAS where it is faster; see `ForwardOps`.

    Args:
        device: The GPU.
    """

    rotary_angles = staticmethod(rotary_angles)
    rope_kv_write = staticmethod(rope_kv_write)
    prefill_attention = staticmethod(paged_attention)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attend: DecodeAttention | None = None

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See `ForwardOps`."""
        return functional.linear(rms_norm(x, norm, eps), weight, bias)

    def head_norm(self, heads: Tensor, norm: Tensor, eps: float) -> None:
        """See `ForwardOps`."""
        heads.copy_(reference_rms_norm(heads, norm, eps))

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return silu_mul(self.norm_linear(x, norm, eps, gate_up))

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `ForwardOps`.  Rounds the sum once, where the reference rounds the product too."""
        residual.addmm_(x, weight.t())

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return self.norm_linear(x, norm, eps, weight).float()

    def decode_attention(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        pools: PoolPair,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """See `ForwardOps`.

        Raises:
            RuntimeError: `prepare_decode` was not called.
            ShapeError: There is a sliding window, which this kernel does not have.
        """
        if window is not None:
            raise ShapeError(f"a sliding window of {window} tokens needs another kernel")
        if self._attend is None:
            raise RuntimeError("prepare_decode comes before the first decode")
        query = rope_kv_write(qkv, cos, sin, pools.own[:, layer], slot_mapping)
        return self._attend(query, pools, block_tables, context_lens, layer=layer, scale=scale)

    def prepare_decode(
        self,
        *,
        max_batch: int,
        max_context_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """Take the scratch memory of decode attention; see `ForwardOps`."""
        self._attend = DecodeAttention(
            max_batch=max_batch,
            max_context_len=max_context_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            device=self._device,
        )
