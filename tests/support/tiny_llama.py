"""A decoder small enough for unit tests, with random weights and odd proportions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.model.spec import ModelSpec
from shared.model.tensors import layer_shapes

if TYPE_CHECKING:
    from torch import Tensor


def tiny_spec(*, tied_embeddings: bool = True) -> ModelSpec:
    """Return a shape whose sizes all differ, so that no two can be mixed up unnoticed."""
    return ModelSpec(
        name="tiny",
        architecture="llama",
        num_layers=3,
        hidden_size=42,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=56,
        vocab_size=97,
        max_context_tokens=512,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=tied_embeddings,
        bos_id=1,
        eos_ids=(2,),
    )


def random_tensors(spec: ModelSpec, *, seed: int = 0) -> dict[str, Tensor]:
    """Return float32 weights by the names that `load_weights` gives them."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator).mul_(columns**-0.5)

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(spec.hidden_size, generator=generator)

    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {
        "embed": torch.randn(spec.vocab_size, spec.hidden_size, generator=generator),
        "final_norm": norm(),
    }
    if not spec.tied_embeddings:
        tensors["lm_head"] = matrix(spec.vocab_size, spec.hidden_size)
    for index in range(spec.num_layers):
        tensors |= {
            f"layers.{index}.attn_norm": norm(),
            f"layers.{index}.q": matrix(width, spec.hidden_size),
            f"layers.{index}.k": matrix(kv_width, spec.hidden_size),
            f"layers.{index}.v": matrix(kv_width, spec.hidden_size),
            f"layers.{index}.o": matrix(spec.hidden_size, width),
            f"layers.{index}.mlp_norm": norm(),
            f"layers.{index}.gate": matrix(spec.intermediate_size, spec.hidden_size),
            f"layers.{index}.up": matrix(spec.intermediate_size, spec.hidden_size),
            f"layers.{index}.down": matrix(spec.hidden_size, spec.intermediate_size),
        }
        # What some families have beside these: biases about 0, and norms of heads about 1.
        for name, shape in layer_shapes(spec).items():
            if f"layers.{index}.{name}" not in tensors:
                numbers = 0.3 * torch.randn(shape, generator=generator)
                tensors[f"layers.{index}.{name}"] = numbers + (1 if "norm" in name else 0)
    return tensors
