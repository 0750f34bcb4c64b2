"""The table of `shared.ops.forward_ops` for a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from shared.ops.norm import rms_norm as reference_rms_norm
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.argmax import argmax
from shared.ops.triton.decode_attention import DecodeAttention
from shared.ops.triton.gemv import GemvPlan, gemv
from shared.ops.triton.norm import rms_norm
from shared.ops.triton.plans import plan_for
from shared.ops.triton.prefill_attention import prefill_attention
from shared.ops.triton.prefill_choice import choose_prefill_attention
from shared.ops.triton.rope_kv_write import rope_kv_write
from shared.ops.triton.rotary import rotary_angles
from shared.ops.triton.skinny_linear import SkinnyLinear
from shared.ops.triton.tiled_attention import tiled_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.ops.attention import SequenceSpan
    from shared.ops.attention_choice import AttentionChoice, AttentionName, GatheredAttention
    from shared.ops.pool_pair import PoolPair


class TritonOps:
    """Triton kernels, and cuBLAS where it is faster; see `ForwardOps`.

    Args:
        device: The GPU.
    """

    rotary_angles = staticmethod(rotary_angles)
    rope_kv_write = staticmethod(rope_kv_write)
    tiled_attention = staticmethod(tiled_attention)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._attend: DecodeAttention | None = None
        self._library: GatheredAttention | None = None
        self._skinny = SkinnyLinear(device=device)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See `ForwardOps`."""
        product = self._norm_linear(x, norm, eps, weight, x.dtype)
        return product if bias is None else product.add_(bias)

    def head_norm(self, heads: Tensor, norm: Tensor, eps: float) -> None:
        """See `ForwardOps`."""
        heads.copy_(reference_rms_norm(heads, norm, eps))

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """See `ForwardOps`."""
        plan = plan_for(x, gate_up, is_gate=True)
        if isinstance(plan, GemvPlan):
            return gemv(x, gate_up, plan=plan, norm=norm, eps=eps, is_gate=True)
        normed = rms_norm(x, norm, eps)
        if plan is None:
            return silu_mul(functional.linear(normed, gate_up))
        return self._skinny(normed, gate_up, plan=plan, is_gate=True)

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `ForwardOps`.  Rounds the sum once, where the reference rounds the product too."""
        plan = plan_for(x, weight)
        if isinstance(plan, GemvPlan):
            gemv(x, weight, plan=plan, residual=residual)
        elif plan is None:
            residual.addmm_(x, weight.t())
        else:
            self._skinny(x, weight, plan=plan, residual=residual)

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return self._norm_linear(x, norm, eps, weight, torch.float32)

    def _norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, out_dtype: torch.dtype
    ) -> Tensor:
        plan = plan_for(x, weight)
        if isinstance(plan, GemvPlan):
            return gemv(x, weight, plan=plan, norm=norm, eps=eps, out_dtype=out_dtype)
        normed = rms_norm(x, norm, eps)
        if plan is None:
            return functional.linear(normed, weight).to(out_dtype)
        return self._skinny(normed, weight, plan=plan, out_dtype=out_dtype)

    def prefill_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        spans: Sequence[SequenceSpan],
        *,
        scale: float,
        peer_layer: Tensor | None = None,
    ) -> Tensor:
        """See `ForwardOps`."""
        return prefill_attention(
            query, kv_layer, spans, scale=scale, peer_layer=peer_layer, library=self._library
        )

    def decode_step(
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
        """
        if self._attend is None:
            raise RuntimeError("prepare_decode comes before the first decode")
        return self._attend(
            qkv,
            cos,
            sin,
            slot_mapping,
            pools,
            block_tables,
            context_lens,
            layer=layer,
            scale=scale,
            window=window,
        )

    def argmax(self, logits: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return argmax(logits)

    def prepare_prefill(
        self,
        kv_layer: Tensor,
        *,
        num_heads: int,
        max_query_len: int,
        max_context_len: int,
        attention: AttentionName = "auto",
    ) -> AttentionChoice:
        """Try the attention that is installed, or compile cuDNN's; see `ForwardOps`."""
        self._library, choice = choose_prefill_attention(
            kv_layer,
            num_heads=num_heads,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            wanted=attention,
        )
        return choice

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
