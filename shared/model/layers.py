"""One layer's weights, out of a checkpoint's tensors and fused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.model.tensors import layer_shapes

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from torch import Tensor

    from shared.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """One layer's weights; matrices are [out_features, in_features]."""

    attn_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[num_heads + num_kv_heads, head_dim] float32, of queries and keys as they lie in `qkv`."""
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def take_layers(tensors: MutableMapping[str, Tensor], spec: ModelSpec) -> tuple[Layer, ...]:
    """Take all layers' weights out of `tensors`, fused."""
    layers: list[Layer] = []
    last_parts: tuple[int, ...] = ()
    names = tuple(layer_shapes(spec))
    for index in range(spec.num_layers):
        # Ids are told apart safely: what the mapping held at one time, no other object was.
        parts = tuple(id(tensors[f"layers.{index}.{name}"]) for name in names)
        if parts == last_parts:
            for name in names:
                del tensors[f"layers.{index}.{name}"]
            layers.append(layers[-1])
        else:
            layers.append(_take_layer(tensors, index, spec))
        last_parts = parts
    return tuple(layers)


def _take_layer(tensors: MutableMapping[str, Tensor], index: int, spec: ModelSpec) -> Layer:
    """Take one layer's weights out of `tensors`, fused."""

    def take(*names: str) -> Tensor:
        return torch.cat([tensors.pop(f"layers.{index}.{name}") for name in names])

    def take_head_norm() -> Tensor:
        query, key = take("q_norm").float(), take("k_norm").float()
        return torch.cat([query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1)])

    return Layer(
        attn_norm=take("attn_norm").float(),
        qkv=take("q", "k", "v"),
        qkv_bias=take("q_bias", "k_bias", "v_bias") if spec.qkv_bias else None,
        head_norm=take_head_norm() if spec.qk_norm else None,
        o=take("o"),
        mlp_norm=take("mlp_norm").float(),
        gate_up=take("gate", "up"),
        down=take("down"),
    )
