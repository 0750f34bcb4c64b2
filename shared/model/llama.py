"""The forward pass of a Llama-family decoder over a paged KV cache.

Weights of products that read the same input are fused into one matrix, so a layer is four
products: QKV, output, gate with up, and down.  Activations keep the weights' type; norms,
rotations and logits are computed in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from shared.model.rope import inverse_wavelengths
from shared.ops.activation import silu_mul
from shared.ops.attention import paged_attention
from shared.ops.greedy import GreedyHead
from shared.ops.kv_write import write_kv
from shared.ops.norm import add_rms_norm, rms_norm
from shared.ops.rotary import apply_rotary, rotary_angles

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import Tensor

    from shared.model.batch import ForwardBatch
    from shared.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """One layer's weights; matrices are [out_features, in_features]."""

    attn_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Llama:
    """A decoder's weights and its forward pass.

    Args:
        spec: The model's shape.
        tensors: Its weights by name, as `load_weights` returns them.  They are taken out one by
            one while the fused ones are made, so at no time does more than one layer exist twice.

    Raises:
        KeyError: A weight is missing.
    """

    def __init__(self, spec: ModelSpec, tensors: MutableMapping[str, Tensor]) -> None:
        self.spec = spec
        self._embed = tensors.pop("embed")
        self._layers = tuple(_take_layer(tensors, index) for index in range(spec.num_layers))
        self._final_norm = tensors.pop("final_norm").float()
        self._lm_head = self._embed if spec.tied_embeddings else tensors.pop("lm_head")
        # On the CPU only: a GPU reads the whole matrix in less time than it takes to choose rows.
        is_exact_on_cpu = self.dtype is torch.float32 and self._lm_head.device.type == "cpu"
        self._greedy_head = GreedyHead(self._lm_head) if is_exact_on_cpu else None
        self._inverse_wavelengths = inverse_wavelengths(spec.head_dim, spec.rope_theta)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights, activations and KV cache."""
        return self._embed.dtype

    def forward(self, batch: ForwardBatch, kv: Tensor) -> Tensor:
        """Run a step through all layers and write its keys and values into the pool.

        Args:
            batch: The step's tokens.
            kv: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] in `dtype`.  Every
                earlier token of each sequence is in it.

        Returns:
            [num_tokens, hidden_size], for `logits` of the rows that are wanted.
        """
        spec = self.spec
        num_tokens = batch.token_ids.shape[0]
        num_rotated = spec.num_heads + spec.num_kv_heads
        scale = spec.head_dim**-0.5
        cos, sin = rotary_angles(batch.positions, self._inverse_wavelengths)

        residual = functional.embedding(batch.token_ids, self._embed)
        hidden = torch.zeros_like(residual)  # there is no earlier layer to add
        for index, layer in enumerate(self._layers):
            kv_layer = kv[:, index]
            hidden = add_rms_norm(hidden, residual, layer.attn_norm, spec.rms_norm_eps)
            qkv = functional.linear(hidden, layer.qkv).view(num_tokens, -1, spec.head_dim)
            # Queries and keys lie side by side, so both turn at once.
            rotated = apply_rotary(qkv[:, :num_rotated], cos, sin)
            write_kv(
                kv_layer, rotated[:, spec.num_heads :], qkv[:, num_rotated:], batch.slot_mapping
            )
            attended = paged_attention(
                rotated[:, : spec.num_heads], kv_layer, batch.spans, scale=scale
            )
            hidden = functional.linear(attended.view(num_tokens, -1), layer.o)
            hidden = add_rms_norm(hidden, residual, layer.mlp_norm, spec.rms_norm_eps)
            hidden = functional.linear(
                silu_mul(functional.linear(hidden, layer.gate_up)), layer.down
            )
        return residual.add_(hidden)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the token of the largest logit behind each row; a tie goes to the lowest id.

        Args:
            hidden: [num_rows, hidden_size], rows of what `forward` returned.

        Returns:
            [num_rows] int64.
        """
        if self._greedy_head is None:
            return self.logits(hidden).argmax(-1)
        return self._greedy_head.argmax(rms_norm(hidden, self._final_norm, self.spec.rms_norm_eps))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the scores of all tokens to come after each row.

        Args:
            hidden: [num_rows, hidden_size], rows of what `forward` returned.

        Returns:
            [num_rows, vocab_size] float32.
        """
        normed = rms_norm(hidden, self._final_norm, self.spec.rms_norm_eps)
        return functional.linear(normed, self._lm_head).float()


def _take_layer(tensors: MutableMapping[str, Tensor], index: int) -> _Layer:
    """Take one layer's weights out of `tensors`, fused."""

    def take(*names: str) -> Tensor:
        return torch.cat([tensors.pop(f"layers.{index}.{name}") for name in names])

    return _Layer(
        attn_norm=take("attn_norm").float(),
        qkv=take("q", "k", "v"),
        o=take("o"),
        mlp_norm=take("mlp_norm").float(),
        gate_up=take("gate", "up"),
        down=take("down"),
    )
