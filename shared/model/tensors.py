"""The weights that a model has: their names here and their shapes.  Pure.

Readers of every file format give tensors under these names; the forward pass takes them by these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shared.model.spec import ModelSpec


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of one layer; matrices are [out, in]."""
    query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm": (spec.hidden_size,),
        "q": (query_size, spec.hidden_size),
        "k": (kv_size, spec.hidden_size),
        "v": (kv_size, spec.hidden_size),
        "o": (spec.hidden_size, query_size),
        "mlp_norm": (spec.hidden_size,),
        "gate": (spec.intermediate_size, spec.hidden_size),
        "up": (spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
    }
    if spec.qkv_bias:
        shapes |= {"q_bias": (query_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model; those of layer N are `layers.N.…`."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (spec.vocab_size, spec.hidden_size),
        "final_norm": (spec.hidden_size,),
    }
    if not spec.tied_embeddings:
        shapes["lm_head"] = (spec.vocab_size, spec.hidden_size)
    layer = layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
