"""A GGUF file small enough for unit tests, written by the `gguf` package's own writer.

A recipe is a complete and valid model; tests change one thing in it and write it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 256, 4, 2, 64, 256
CONTROL_TOKENS = ("<|end|>", "<|start|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w")

Typed = tuple[object, GGUFValueType]


def byte_tokens() -> list[str]:
    """Return the 256 characters of the byte-level alphabet, in the order of GPT-2's paper code."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1)]
    plain += range(ord("®"), ord("ÿ") + 1)
    rest = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + index) for index in range(len(rest))]


def tokens() -> list[str]:
    """Return the tiny model's vocabulary: control tokens, bytes, merges."""
    return [*CONTROL_TOKENS, *byte_tokens(), *(merge.replace(" ", "") for merge in MERGES)]


def context_of(num_tokens: int) -> dict[str, Typed]:
    """Return the metadata of a model that takes so many tokens."""
    return {"llama.context_length": (num_tokens, GGUFValueType.UINT32)}


@dataclass
class TinyGguf:
    """What goes into the file."""

    num_layers: int = 1
    metadata: dict[str, Typed] = field(default_factory=dict)
    tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    kinds: dict[str, GGMLQuantizationType] = field(default_factory=dict)
    """Storage types by tensor; F32 where none is named."""

    def __post_init__(self) -> None:
        u32, f32, text = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
        array = GGUFValueType.ARRAY
        vocabulary = tokens()
        kinds = [3 if token in CONTROL_TOKENS else 1 for token in vocabulary]
        self.metadata = {
            "general.name": ("tiny", text),
            "llama.block_count": (self.num_layers, u32),
            "llama.context_length": (128, u32),
            "llama.embedding_length": (HIDDEN, u32),
            "llama.feed_forward_length": (FEED_FORWARD, u32),
            "llama.attention.head_count": (HEADS, u32),
            "llama.attention.head_count_kv": (KV_HEADS, u32),
            "llama.attention.layer_norm_rms_epsilon": (1e-5, f32),
            "llama.rope.freq_base": (10_000.0, f32),
            "tokenizer.ggml.model": ("gpt2", text),
            "tokenizer.ggml.pre": ("smollm", text),
            "tokenizer.ggml.tokens": (vocabulary, array),
            "tokenizer.ggml.token_type": (kinds, array),
            "tokenizer.ggml.merges": (list(MERGES), array),
            "tokenizer.ggml.bos_token_id": (1, u32),
            "tokenizer.ggml.eos_token_id": (0, u32),
            "tokenizer.chat_template": (
                "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
                text,
            ),
        } | self.metadata
        random = np.random.default_rng(0)
        query, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (len(vocabulary), HIDDEN),
            "output_norm.weight": (HIDDEN,),
        }
        for layer in range(self.num_layers):
            shapes |= {
                f"blk.{layer}.attn_norm.weight": (HIDDEN,),
                f"blk.{layer}.attn_q.weight": (query, HIDDEN),
                f"blk.{layer}.attn_k.weight": (kv, HIDDEN),
                f"blk.{layer}.attn_v.weight": (kv, HIDDEN),
                f"blk.{layer}.attn_output.weight": (HIDDEN, query),
                f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
                f"blk.{layer}.ffn_gate.weight": (FEED_FORWARD, HIDDEN),
                f"blk.{layer}.ffn_up.weight": (FEED_FORWARD, HIDDEN),
                f"blk.{layer}.ffn_down.weight": (HIDDEN, FEED_FORWARD),
            }
        self.tensors = {
            name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()
        } | self.tensors

    def write(self, path: Path, *, architecture: str = "llama") -> Path:
        """Write the file and return its path."""
        writer = gguf.GGUFWriter(path, architecture)
        for key, (value, kind) in self.metadata.items():
            if kind is GGUFValueType.ARRAY:
                writer.add_array(key, value)
            else:
                writer.add_key_value(key, value, kind)
        for name, tensor in self.tensors.items():
            kind = self.kinds.get(name, GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path
