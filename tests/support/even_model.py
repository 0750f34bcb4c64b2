"""A random model whose numbers stay of one size, so that rounding shows only far behind the point.

The other tiny model's weights are all of size 1: its sums grow, and two right float32 computations
of one logit differ by up to 1e-2.  Here they differ by some 1e-5, as a trained model's do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.tiny_gguf import TinyGguf, context_of

if TYPE_CHECKING:
    from pathlib import Path

CONTEXT_TOKENS = 4096
LOGIT_STD = 4.0
"""Greedy answers vary, and few choices are close."""


def write_even_model(folder: Path, *, num_layers: int = 2) -> Path:
    """Write the model's file and return its path."""
    recipe = TinyGguf(num_layers=num_layers, metadata=context_of(CONTEXT_TOKENS))
    for name, tensor in recipe.tensors.items():
        if name.endswith("norm.weight"):
            recipe.tensors[name] = 1 + 0.1 * tensor
        elif name != "token_embd.weight":
            recipe.tensors[name] = tensor * tensor.shape[1] ** -0.5
    embedding = recipe.tensors["token_embd.weight"]
    # A head of its own: with the embedding for one, each token would be followed by itself.
    head = np.random.default_rng(1).standard_normal(embedding.shape, dtype=np.float32)
    recipe.tensors["output.weight"] = LOGIT_STD * head * embedding.shape[1] ** -0.5
    return recipe.write(folder / "even.gguf")
