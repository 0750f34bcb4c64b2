"""The forward pass of a Llama-family decoder over a paged KV cache, on a CPU or a GPU.

Weights of products that read the same input are fused into one matrix, so a layer is four
products: QKV, output, gate with up, and down.  Activations keep the weights' type; norms,
rotations and logits are computed in float32.  How a step is computed on the weights' device is
for `shared.ops.forward_ops` to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shared.model.batch import PaddedBatch
from shared.model.layers import take_layers
from shared.model.rope import inverse_wavelengths
from shared.ops.forward_ops import ops_for
from shared.ops.greedy import GreedyHead
from shared.ops.norm import rms_norm

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from shared.model.batch import DecodeBatch, ForwardBatch
    from shared.model.layers import Layer
    from shared.model.spec import ModelSpec
    from shared.ops.attention_choice import AttentionChoice, AttentionName
    from shared.ops.forward_ops import ForwardOps
    from shared.ops.pool_pair import PoolPair


class Begun(NamedTuple):
    """A step all of whose keys and values are written; of the rest, the rows that are wanted."""

    query: Tensor
    """[num_outputs, num_heads, head_dim], the last layer's, rotated."""
    residual: Tensor
    """[num_outputs, hidden_size], before the last layer's attention."""


class Llama:
    """A decoder's weights and its forward pass.

    Args:
        spec: The model's shape.
        tensors: Its weights by name, as `load_weights` returns them, on the device that is to
            compute.  They are taken out one by one while the fused ones are made, so at no time
            does more than one layer exist twice.  Layers that are the same tensors share memory.
        ops: How to compute; by default what suits the device.

    Raises:
        KeyError: A weight is missing.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tensors: MutableMapping[str, Tensor],
        ops: ForwardOps | None = None,
    ) -> None:
        self.spec = spec
        self._embed = tensors.pop("embed")
        self._layers = take_layers(tensors, spec)
        self._final_norm = tensors.pop("final_norm").float()
        self._lm_head = self._embed if spec.tied_embeddings else tensors.pop("lm_head")
        # On the CPU only: a GPU reads the whole matrix in less time than it takes to choose rows.
        is_exact_on_cpu = self.dtype is torch.float32 and self.device.type == "cpu"
        self._greedy_head = GreedyHead(self._lm_head) if is_exact_on_cpu else None
        wavelengths = inverse_wavelengths(spec.head_dim, spec.rope_theta, spec.rope_scaling)
        self._inverse_wavelengths = wavelengths.to(self.device)
        self._ops = ops_for(self.device) if ops is None else ops
        self._scale = spec.head_dim**-0.5

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and KV cache."""
        return self._embed.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._embed.device

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Run a step through all layers and write its keys and values into the pool.

        Args:
            batch: The step's tokens.
            kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in `dtype`.  Every
                earlier token of each sequence is in it.

        Returns:
            [num_tokens, hidden_size], for `logits` of the rows that are wanted; with
            `batch.output_rows`, only those rows.
        """
        return self.finish(batch, self.begin(batch, kv), kv)

    def begin(self, batch: ForwardBatch | PaddedBatch, kv: Tensor) -> Begun:
        """Run the part of `forward` that writes into the pool.

        With a `PaddedBatch` it never synchronises with the host, so that a CUDA graph can capture
        it; the same goes for `finish`.
        """
        ops = self._ops
        cos, sin = ops.rotary_angles(batch.positions, self._inverse_wavelengths)
        residual = functional.embedding(batch.token_ids, self._embed)
        for index, layer in enumerate(self._layers):
            query = ops.rope_kv_write(
                self._qkv(residual, layer), cos, sin, kv[:, index], batch.slot_mapping
            )
            if index < len(self._layers) - 1:
                self._leave_layer(layer, residual, self._attend(query, kv, index, batch))
        if batch.wants_all:
            return Begun(query, residual)
        return Begun(query[batch.output_index], residual[batch.output_index])

    def finish(self, batch: ForwardBatch | PaddedBatch, begun: Begun, kv: Tensor) -> Tensor:
        """Run the rest of `forward`: what is left of the last layer.

        Args:
            batch: The step.
            begun: What `begin` returned; changed by this.
            kv: The pool.

        Returns:
            [num_outputs, hidden_size].
        """
        query, residual = begun
        if residual.shape[0]:
            last = len(self._layers) - 1
            attended = self._attend(query, kv, last, batch, is_of_outputs=True)
            self._leave_layer(self._layers[last], residual, attended)
        return residual

    def _attend(
        self,
        query: Tensor,
        kv: Tensor,
        index: int,
        batch: ForwardBatch | PaddedBatch,
        *,
        is_of_outputs: bool = False,
    ) -> Tensor:
        """Attend in one layer with all tokens of a step, or with those that are wanted."""
        if isinstance(batch, PaddedBatch):
            return self._ops.tiled_attention(
                query,
                kv[:, index],
                batch.output_tiles if is_of_outputs else batch.tiles,
                batch.block_table,
                scale=self._scale,
                window=self.spec.sliding_window,
            )
        return self._ops.prefill_attention(
            query,
            kv[:, index],
            batch.output_spans(kv.shape[4]) if is_of_outputs else batch.spans,
            scale=self._scale,
            peer_layer=None if batch.peer is None else batch.peer[:, index],
        )

    def _leave_layer(self, layer: Layer, residual: Tensor, attended: Tensor) -> None:
        """Add what attention and feed-forward of a layer make of its rows, in place."""
        ops = self._ops
        ops.add_linear(residual, attended.flatten(1), layer.o)
        gated = ops.norm_gate(residual, layer.mlp_norm, self.spec.rms_norm_eps, layer.gate_up)
        ops.add_linear(residual, gated, layer.down)

    def prepare_prefill(
        self,
        kv: Tensor,
        *,
        max_query_len: int,
        max_context_len: int,
        attention: AttentionName = "auto",
    ) -> AttentionChoice:
        """Have everything compiled that `forward` may need; seconds on a GPU, nothing on a CPU.

        Args:
            kv: The pool, of which only shape and type matter.
            max_query_len: Longest chunk of a prompt, in tokens.
            max_context_len: Longest context, in tokens.
            attention: Who is to compute it.

        Returns:
            Who does.

        Raises:
            AttentionUnavailableError: What `attention` names cannot be used.
        """
        return self._ops.prepare_prefill(
            kv[:, 0],
            num_heads=self.spec.num_heads,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
            attention=attention,
        )

    def prepare_decode(self, *, max_batch: int, max_context_len: int) -> None:
        """Take the memory that `decode` works in; once, before its first call and before capture.

        Args:
            max_batch: Most rows of a `DecodeBatch`, padding included.
            max_context_len: Longest context of any row, in tokens.
        """
        self._ops.prepare_decode(
            max_batch=max_batch,
            max_context_len=max_context_len,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
        )

    def decode(self, batch: DecodeBatch, pools: PoolPair) -> Tensor:
        """Run one token of every row through all layers; its keys and values go to `pools.own`.

        Args:
            batch: The rows.
            pools: Where the blocks of their tables are.

        Returns:
            [batch, hidden_size]; what is in padding rows means nothing.

        On a GPU it never synchronises with the host, so that a CUDA graph can capture it.

        Raises:
            RuntimeError: The device needs `prepare_decode` first.
        """
        ops = self._ops
        cos, sin = ops.rotary_angles(batch.positions, self._inverse_wavelengths)
        residual = functional.embedding(batch.token_ids, self._embed)
        for index, layer in enumerate(self._layers):
            attended = ops.decode_step(
                self._qkv(residual, layer),
                cos,
                sin,
                batch.slot_mapping,
                pools,
                batch.block_tables,
                batch.context_lens,
                layer=index,
                scale=self._scale,
                window=self.spec.sliding_window,
            )
            self._leave_layer(layer, residual, attended)
        return residual

    def _qkv(self, residual: Tensor, layer: Layer) -> Tensor:
        """Return [num_tokens, num_heads + 2 · num_kv_heads, head_dim], not yet rotated."""
        eps, num_normed = self.spec.rms_norm_eps, self.spec.num_heads + self.spec.num_kv_heads
        qkv = self._ops.norm_linear(residual, layer.attn_norm, eps, layer.qkv, layer.qkv_bias)
        heads = qkv.view(qkv.shape[0], -1, self.spec.head_dim)
        if layer.head_norm is not None:
            self._ops.head_norm(heads[:, :num_normed], layer.head_norm, eps)
        return heads

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the token of the largest logit behind each row; a tie goes to the lowest id.

        Args:
            hidden: [num_rows, hidden_size], rows of what `forward` or `decode` returned.

        Returns:
            [num_rows] int64.
        """
        return self.likeliest_with_logits(hidden)[0]

    def likeliest_with_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what `likeliest` does, and all logits where they had to be computed for it."""
        if self._greedy_head is None:
            logits = self.logits(hidden)
            return self._ops.argmax(logits), logits
        normed = rms_norm(hidden, self._final_norm, self.spec.rms_norm_eps)
        return self._greedy_head.argmax(normed), None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens to come after each row.

        Args:
            hidden: [num_rows, hidden_size], rows of what `forward` or `decode` returned.

        Returns:
            [num_rows, vocab_size] float32.
        """
        return self._ops.logits(hidden, self._final_norm, self.spec.rms_norm_eps, self._lm_head)
