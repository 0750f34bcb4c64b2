"""Models of a named shape with random weights: speed and memory of a model without its file.

What such a model says is noise.  Its text is one token a byte, and it has no token that ends an
answer, so an answer is as long as was asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.model.errors import UnknownModelError
from shared.model.gguf_tokenizer import vocabulary_tokenizer
from shared.model.spec import ModelSpec
from shared.model.tokenizer import byte_alphabet
from shared.model.vocabulary import TokenType, Vocabulary

if TYPE_CHECKING:
    from torch import Tensor

    from shared.model.tokenizer import Tokenizer

PREFIX = "random:"
"""What the name of such a model begins with, in `model.path`."""

WEIGHT_STD = 0.02
"""Of every matrix; small enough for activations to stay finite in float16 over 80 layers."""

SEED = 20_261_129
"""The same weights in every process, so that one daemon can go on where the other stopped."""


def _llama(
    name: str, *, num_layers: int, hidden_size: int, num_heads: int, intermediate_size: int
) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture="llama",
        max_context_tokens=131_072,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=False,
        bos_id=None,
        eos_ids=(),
        vocab_size=128_256,
        num_kv_heads=8,
        head_dim=128,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        intermediate_size=intermediate_size,
    )


SHAPES: dict[str, ModelSpec] = {
    "llama-3.1-8b": _llama(
        "llama-3.1-8b",
        num_layers=32,
        hidden_size=4_096,
        num_heads=32,
        intermediate_size=14_336,
    ),
    "llama-3-70b": _llama(
        "llama-3-70b",
        num_layers=80,
        hidden_size=8_192,
        num_heads=64,
        intermediate_size=28_672,
    ),
    "smollm2-135m": ModelSpec(
        name="smollm2-135m",
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1_536,
        vocab_size=49_152,
        max_context_tokens=8_192,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        bos_id=None,
        eos_ids=(),
    ),
}
"""The shapes that there are, by the name behind `PREFIX`."""

SHARED_LAYERS = frozenset({"llama-3-70b"})
"""Shapes whose layers are all one layer's weights: 70 billion would need two GPUs.  Compute, KV
cache and hand-over are those of the whole model."""


def find_shape(path_or_name: str) -> ModelSpec:
    """Return the shape that `random:NAME` names.

    Raises:
        UnknownModelError: There is none of that name.
    """
    name = path_or_name.removeprefix(PREFIX)
    if name not in SHAPES:
        known = ", ".join(PREFIX + shape for shape in SHAPES)
        raise UnknownModelError(f"no shape is called {name!r}", hint=f"known are: {known}")
    return SHAPES[name]


def random_tensors(
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    share_layers: bool = False,
    seed: int = SEED,
) -> dict[str, Tensor]:
    """Make weights under the names that `load_weights` gives them, where they will be used.

    Args:
        spec: The model's shape.
        dtype: Of the weights.
        device: Where they are made.  Another kind of device makes other numbers.
        share_layers: Whether all layers are the same tensors.
        seed: Of all numbers.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        numbers = torch.empty(rows, columns, dtype=dtype, device=device)
        return numbers.normal_(0, WEIGHT_STD, generator=generator)

    def norm() -> Tensor:
        return torch.ones(spec.hidden_size, dtype=dtype, device=device)

    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    tensors = {"embed": matrix(spec.vocab_size, spec.hidden_size), "final_norm": norm()}
    if not spec.tied_embeddings:
        tensors["lm_head"] = matrix(spec.vocab_size, spec.hidden_size)
    layer: dict[str, Tensor] = {}
    for index in range(spec.num_layers):
        if index == 0 or not share_layers:
            layer = {
                "attn_norm": norm(),
                "q": matrix(width, spec.hidden_size),
                "k": matrix(kv_width, spec.hidden_size),
                "v": matrix(kv_width, spec.hidden_size),
                "o": matrix(spec.hidden_size, width),
                "mlp_norm": norm(),
                "gate": matrix(spec.intermediate_size, spec.hidden_size),
                "up": matrix(spec.intermediate_size, spec.hidden_size),
                "down": matrix(spec.hidden_size, spec.intermediate_size),
            }
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def byte_tokenizer(spec: ModelSpec) -> Tokenizer:
    """Return a tokenizer of `spec.vocab_size` tokens, of which the first 256 are the bytes.

    The others stand for their own number, so that what a model samples can be read.
    """
    characters = {byte: character for character, byte in byte_alphabet().items()}
    texts = [characters[byte] for byte in range(256)]
    texts += [f"<{token_id}>" for token_id in range(256, spec.vocab_size)]
    vocabulary = Vocabulary(
        model="gpt2",
        pre="gpt-2",
        tokens=tuple(texts),
        token_types=(TokenType.NORMAL,) * spec.vocab_size,
        merges=(),
        add_bos=False,
        bos_id=None,
    )
    return vocabulary_tokenizer(vocabulary, source=Path(PREFIX + spec.name))
