"""The steps of a forward pass as one table, so that a model is written once for every device.

`ops_for` chooses: a CPU computes with the torch references, a GPU with the Triton kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

from shared.ops.activation import silu_mul
from shared.ops.attention import paged_attention
from shared.ops.attention_choice import AttentionChoice, AttentionUnavailableError
from shared.ops.decode_step import decode_step
from shared.ops.norm import rms_norm
from shared.ops.rope_kv_write import rope_kv_write
from shared.ops.rotary import rotary_angles
from shared.ops.tiled_attention import tiled_attention

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from shared.ops.attention import SequenceSpan
    from shared.ops.attention_choice import AttentionName
    from shared.ops.pool_pair import PoolPair


class ForwardOps(Protocol):
    """What a layer is made of.

    Weights of products are [out_features, in_features] in the type of the activations, those of
    norms [in_features] float32.  Nothing here synchronises with a GPU, except where said.
    """

    def rotary_angles(
        self, positions: Tensor, inverse_wavelengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines for a step's tokens; see `shared.ops.rotary`."""

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Return `weight` times the RMSNorm of each row, plus `bias`.

        Returns:
            [num_tokens, out_features].
        """

    def head_norm(self, heads: Tensor, norm: Tensor, eps: float) -> None:
        """Replace heads by their RMSNorm.

        Args:
            heads: [num_tokens, num_heads, head_dim], any strides.
            norm: [num_heads, head_dim] float32, each head's own weights.
            eps: Added to the mean of squares.
        """

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """Return `silu(gate) · up` behind the RMSNorm of each row.

        Args:
            x: [num_tokens, hidden_size].
            norm: [hidden_size] float32.
            eps: Added to the mean of squares.
            gate_up: [2 · intermediate_size, hidden_size], the gate's rows first.

        Returns:
            [num_tokens, intermediate_size].
        """

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        """Add `weight` times each row of `x` to `residual` [num_tokens, out_features], in place."""

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """Return `norm_linear` as float32: [num_tokens, vocab_size]."""

    def rope_kv_write(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, slot_mapping: Tensor
    ) -> Tensor:
        """Return rotated queries, write keys and values; see `shared.ops.rope_kv_write`."""

    def prefill_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        spans: Sequence[SequenceSpan],
        *,
        scale: float,
        peer_layer: Tensor | None = None,
    ) -> Tensor:
        """Attend with the tokens of prompts; see `shared.ops.attention.paged_attention`."""

    def tiled_attention(
        self,
        query: Tensor,
        kv_layer: Tensor,
        tiles: Tensor,
        block_table: Tensor,
        *,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """The same inside a CUDA graph; see `shared.ops.tiled_attention`."""

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
        """Rotate and write one token a sequence, attend with it; see `shared.ops.decode_step`."""

    def argmax(self, logits: Tensor) -> Tensor:
        """Return the index of each row's largest number, the lowest of several: [rows] int64."""

    def prepare_prefill(
        self,
        kv_layer: Tensor,
        *,
        num_heads: int,
        max_query_len: int,
        max_context_len: int,
        attention: AttentionName = "auto",
    ) -> AttentionChoice:
        """Choose who computes `prefill_attention`, and have compiled what that may need.

        Raises:
            AttentionUnavailableError: What `attention` names cannot be used.
        """

    def prepare_decode(
        self,
        *,
        max_batch: int,
        max_context_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """Take the memory that `decode_step` needs beside its arguments.

        Once, before the first call: what a CUDA graph has captured must not move.
        """


class TorchOps:
    """The references of `shared.ops`, on any device; see `ForwardOps`."""

    rotary_angles = staticmethod(rotary_angles)
    rope_kv_write = staticmethod(rope_kv_write)
    prefill_attention = staticmethod(paged_attention)
    tiled_attention = staticmethod(tiled_attention)
    decode_step = staticmethod(decode_step)

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """See `ForwardOps`."""
        return functional.linear(rms_norm(x, norm, eps), weight, bias)

    def head_norm(self, heads: Tensor, norm: Tensor, eps: float) -> None:
        """See `ForwardOps`."""
        heads.copy_(rms_norm(heads, norm, eps))

    def norm_gate(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return silu_mul(self.norm_linear(x, norm, eps, gate_up))

    def add_linear(self, residual: Tensor, x: Tensor, weight: Tensor) -> None:
        """See `ForwardOps`."""
        residual.add_(functional.linear(x, weight))

    def logits(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return self.norm_linear(x, norm, eps, weight).float()

    def argmax(self, logits: Tensor) -> Tensor:
        """See `ForwardOps`."""
        return logits.argmax(-1)

    def prepare_prefill(
        self,
        kv_layer: Tensor,
        *,
        num_heads: int,
        max_query_len: int,
        max_context_len: int,
        attention: AttentionName = "auto",
    ) -> AttentionChoice:
        """There is nothing to compile, and libraries are for GPUs.

        Raises:
            AttentionUnavailableError: `attention` names one.
        """
        if attention not in ("auto", "torch"):
            raise AttentionUnavailableError(f"{attention} is for GPUs")
        return AttentionChoice(name="torch", because="there is nothing else for a CPU")

    def prepare_decode(
        self,
        *,
        max_batch: int,
        max_context_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        """Nothing: the references allocate as they go."""


def ops_for(device: torch.device) -> ForwardOps:
    """Return the table for a device.  Each call makes one, for one engine."""
    if device.type == "cuda":
        from shared.ops.triton.forward_ops import TritonOps  # noqa: PLC0415 - triton needs a GPU

        return TritonOps(device)
    return TorchOps()
