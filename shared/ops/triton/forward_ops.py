"""The table of `shared.ops.forward_ops` for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from shared.ops.errors import ShapeError
from shared.ops.norm import rms_norm as reference_rms_norm
from shared.ops.rotary import rotary_angles
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.decode_attention import DecodeAttention
from shared.ops.triton.norm import rms_norm
from shared.ops.triton.plans import skinny_plan
from shared.ops.triton.prefill_attention import prefill_attention
from shared.ops.triton.rope_kv_write import rope_kv_write
from shared.ops.triton.skinny_linear import SkinnyLinear, SkinnyPlan

if TYPE_CHECKING:
    from shared.ops.pool_pair import PoolPair


class TritonOps:
    """Triton kernels, and cuBLAS where it is faster; see `ForwardOps`.

    Args:
        device: The GPU.
    """

    rotary_angles = staticmethod(rotary_angles)
    rope_kv_write = staticmethod(rope_kv_write)
    prefill_attention = staticmethod(prefill_attention)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attend: DecodeAttention | None = None
        self._skinny = SkinnyLinear(max_partials=1 << 22, max_tiles=4096, device=device)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See `ForwardOps`."""
        product = self._linear(rms_norm(x, norm, eps), weight, x.dtype)
        return product if bias is None else product.add_(bias)

    def head_norm(self, heads: Tensor, norm: Tensor, eps: float) -> None:
        """See `ForwardOps`."""
        heads.copy_(reference_rms_norm(heads, norm, eps))

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """See `ForwardOps`."""
        normed = rms_norm(x, norm, eps)
        plan = self._plan(x, gate_up, is_gate=True)
        if plan is None:
            return silu_mul(functional.linear(normed, gate_up))
        return self._skinny(normed, gate_up, plan=plan, is_gate=True)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `ForwardOps`.  Rounds the sum once, where the reference rounds the product too."""
        plan = self._plan(x, weight)
        if plan is None:
            residual.addmm_(x, weight.t())
        else:
            self._skinny(x, weight, plan=plan, residual=residual)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return self._linear(rms_norm(x, norm, eps), weight, torch.float32)

    def _linear(self, x: Tensor, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        plan = self._plan(x, weight)
        if plan is None:
            return functional.linear(x, weight).to(out_dtype)
        return self._skinny(x, weight, plan=plan, out_dtype=out_dtype)

    def _plan(self, x: Tensor, weight: Tensor, *, is_gate: bool = False) -> SkinnyPlan | None:
        if x.dtype is torch.float32:  # exact sums are cuBLAS's
            return None
        num_outputs = weight.shape[0] // (2 if is_gate else 1)
        return skinny_plan(x.shape[0], num_outputs, x.shape[1], is_gate=is_gate)

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
