"""What a model is, in numbers: enough to build its forward pass and to size its KV cache.

Pure data.  A `ModelSpec` that exists is consistent: `__post_init__` refuses, by the field's name,
every shape that the forward pass could not run.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from shared.kv.layout import DTypeName, KVLayout
from shared.model.errors import InvalidSpecError

DType = Literal["float32", "bfloat16", "float16"]
"""The types that weights, activations and KV cache may be kept in."""

DTYPES: tuple[DType, ...] = get_args(DType)
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""The architectures that the forward pass knows: one decoder, told apart by a spec's fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How Llama 3 stretches a rotation for contexts longer than it was first trained for.

    Wavelengths longer than `original_context_tokens / low_freq_factor` grow by `factor`, those
    shorter than `original_context_tokens / high_freq_factor` stay, and between the two the change
    is gradual.

    Raises:
        InvalidSpecError: A field is out of range.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_tokens: int

    def __post_init__(self) -> None:
        for field in ("factor", "low_freq_factor", "high_freq_factor", "original_context_tokens"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InvalidSpecError(
                    f"rope_scaling.{field}", f"is {value}; it must be finite and above 0"
                )
        if self.high_freq_factor <= self.low_freq_factor:
            raise InvalidSpecError(
                "rope_scaling.high_freq_factor",
                f"is {self.high_freq_factor}; it must be above low_freq_factor, "
                f"{self.low_freq_factor}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The shape of one Llama-family decoder.

    Raises:
        InvalidSpecError: A field is out of range or contradicts another.
    """

    name: str
    """What the file calls itself; for people only."""
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Heads of keys and values; each serves `num_heads / num_kv_heads` query heads."""
    head_dim: int
    intermediate_size: int
    """Width of the gated feed-forward layer."""
    vocab_size: int
    max_context_tokens: int
    """Positions that the model was trained for: prompt and answer together."""
    rope_theta: float
    """Base of the rotary embedding's wavelengths, in the half-rotation layout."""
    rms_norm_eps: float
    tied_embeddings: bool
    """The output projection is the embedding matrix, so there is no `lm_head` tensor."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    """Tokens that end an answer, unless the request ignores them."""
    rope_scaling: RopeScaling | None = None
    """None leaves the wavelengths as `rope_theta` gives them."""
    qkv_bias: bool = False
    """Queries, keys and values have a bias."""
    qk_norm: bool = False
    """Each head's query and key pass an RMSNorm before they are rotated."""
    sliding_window: int | None = None
    """A token attends to so many tokens, itself included; None lets it attend to all."""

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise InvalidSpecError(
                "architecture", f"is {self.architecture!r}; this version runs: {known}"
            )
        for field in (
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "intermediate_size",
            "vocab_size",
            "max_context_tokens",
        ):
            value = getattr(self, field)
            if value < 1:
                raise InvalidSpecError(field, f"is {value}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InvalidSpecError(
                "num_kv_heads",
                f"is {self.num_kv_heads}, which does not divide {self.num_heads} heads",
            )
        if self.head_dim % 2:
            raise InvalidSpecError("head_dim", f"is {self.head_dim}; rotation needs an even number")
        for field in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value > 0):
                raise InvalidSpecError(field, f"is {value}; it must be finite and above 0")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise InvalidSpecError(
                "sliding_window", f"is {self.sliding_window}; it must be at least 1"
            )
        special = self.eos_ids if self.bos_id is None else (self.bos_id, *self.eos_ids)
        for token_id in special:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidSpecError(
                    "bos_id" if token_id == self.bos_id else "eos_ids",
                    f"has {token_id}, outside a vocabulary of {self.vocab_size}",
                )

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Return the bytes of keys and values that one token takes, over all layers.

        Raises:
            InvalidSpecError: `dtype` is not one of `DTYPES`.
        """
        if dtype not in DTYPE_BYTES:
            raise InvalidSpecError("dtype", f"is {dtype!r}; known are: {', '.join(DTYPES)}")
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def kv_layout(self, *, num_blocks: int, block_size: int, dtype: DTypeName) -> KVLayout:
        """Return the layout of a pool for this model.

        Args:
            num_blocks: Its blocks, the reserved one included.
            block_size: Tokens a block.
            dtype: Of its numbers.

        Raises:
            LayoutError: There is no such pool.
        """
        return KVLayout(
            num_blocks=num_blocks,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
            dtype=dtype,
        )

    @property
    def num_parameters(self) -> int:
        """Number of weights, counting tied embeddings once."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        feed_forward = 3 * self.hidden_size * self.intermediate_size
        if self.qkv_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_kv_heads)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return embeddings + self.num_layers * (attention + feed_forward + norms) + self.hidden_size

    def fingerprint_fields(self) -> dict[str, Any]:
        """Return every field that two daemons must agree on, by name, as plain values.

        All but `name`: a renamed model is still the same model.
        """
        fields = asdict(self)
        del fields["name"]
        fields["eos_ids"] = list(self.eos_ids)
        return fields
