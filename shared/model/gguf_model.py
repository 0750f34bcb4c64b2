"""Tells from a GGUF header what model the file holds: its shape, vocabulary and chat template.

What the forward pass could not run exactly (experts, scaled or partial rotation, sliding windows,
tensors of unknown purpose) is refused by name here, before any weight is read: a model that loads
is a model that is computed as it was trained.
"""

from __future__ import annotations

from typing import TypeVar

from shared.model.errors import InvalidSpecError, ModelFileError
from shared.model.gguf_file import GgufHeader, Value
from shared.model.spec import ModelSpec
from shared.model.vocabulary import Vocabulary

V = TypeVar("V", bound=Value)
S = TypeVar("S", str, int)

GGUF_ARCHITECTURES = ("llama",)
"""Values of `general.architecture` whose tensors and keys are known here."""

UNSUPPORTED_HINT = "choose another model; `kvpair model list` names ones that run"

MODEL_TENSORS = {
    "token_embd.weight": "embed",
    "output_norm.weight": "final_norm",
    "output.weight": "lm_head",
}
LAYER_TENSORS = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
"""Our names for the file's tensors; those of a layer stand behind `blk.N.` and `layers.N.`."""

SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "pad_token": "padding",
    "unk_token": "unknown",
}
"""What the file calls the tokens that chat templates know by these names."""


def read_spec(header: GgufHeader) -> ModelSpec:
    """Return the shape of the model in a GGUF file.

    Raises:
        ModelFileError: The file lacks a value, or holds a model that we cannot run.
    """
    architecture = _require(header, "general.architecture", str)
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelFileError(
            header.path,
            f"holds the architecture {architecture!r}; "
            f"of GGUF files this version runs: {', '.join(GGUF_ARCHITECTURES)}",
            hint=UNSUPPORTED_HINT,
        )
    _refuse_variants(header)
    hidden_size = _require(header, "llama.embedding_length", int)
    num_heads = _require(header, "llama.attention.head_count", int)
    head_dim = _optional(
        header, "llama.attention.key_length", hidden_size // num_heads if num_heads else 0
    )
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := _optional(header, key, head_dim)) != head_dim:
            raise _unsupported(header, f"{key} = {value}, not the head's {head_dim}")
    num_layers = _require(header, "llama.block_count", int)
    if num_layers > len(header.tensors):  # before anybody makes a list of their tensors
        raise ModelFileError(
            header.path, f"claims {num_layers} layers with {len(header.tensors)} tensors"
        )
    bos_id, eos_ids = _special_ids(header)
    try:
        return ModelSpec(
            name=_optional(header, "general.name", header.path.stem),
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=_optional(header, "llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            intermediate_size=_require(header, "llama.feed_forward_length", int),
            vocab_size=len(_array(header, "tokenizer.ggml.tokens", str)),
            max_context_tokens=_require(header, "llama.context_length", int),
            rope_theta=_optional(header, "llama.rope.freq_base", 10_000.0),
            rms_norm_eps=_decimal(
                _require(header, "llama.attention.layer_norm_rms_epsilon", float)
            ),
            tied_embeddings="output.weight" not in header.tensors,
            bos_id=bos_id,
            eos_ids=eos_ids,
        )
    except InvalidSpecError as error:
        raise ModelFileError(header.path, str(error), hint=UNSUPPORTED_HINT) from error


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """Return the vocabulary in a GGUF file.

    Raises:
        ModelFileError: A part is missing, or parts contradict each other.
    """
    model = _require(header, "tokenizer.ggml.model", str)
    if model != "gpt2":
        raise ModelFileError(
            header.path,
            f"has a tokenizer of kind {model!r}; this version runs: gpt2 (byte-level BPE)",
            hint=UNSUPPORTED_HINT,
        )
    tokens = _array(header, "tokenizer.ggml.tokens", str)
    types = _array(header, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise ModelFileError(header.path, f"has {len(tokens)} tokens but {len(types)} token types")
    bos_id, _ = _special_ids(header)
    return Vocabulary(
        model=model,
        pre=_require(header, "tokenizer.ggml.pre", str),
        tokens=tokens,
        token_types=types,
        merges=_array(header, "tokenizer.ggml.merges", str),
        # Files from before the flag existed hold models whose own tokenizers add nothing.
        add_bos=_optional(header, "tokenizer.ggml.add_bos_token", False),
        bos_id=bos_id,
    )


def read_chat_template(header: GgufHeader) -> str | None:
    """Return the Jinja source of the model's chat template, or None when it has none.

    Raises:
        ModelFileError: The value is not text.
    """
    if "tokenizer.chat_template" not in header.metadata:
        return None
    return _require(header, "tokenizer.chat_template", str)


def read_special_tokens(header: GgufHeader) -> dict[str, str]:
    """Return the texts of special tokens, by the names that chat templates call them.

    Raises:
        ModelFileError: An id is outside the vocabulary.
    """
    tokens = _array(header, "tokenizer.ggml.tokens", str)
    texts: dict[str, str] = {}
    for name, key in SPECIAL_TOKENS.items():
        token_id = _optional(header, f"tokenizer.ggml.{key}_token_id", -1)
        if token_id >= len(tokens):
            raise ModelFileError(
                header.path, f"has {name} {token_id}, outside its {len(tokens)} tokens"
            )
        if token_id >= 0:
            texts[name] = tokens[token_id]
    return texts


def tensor_names(spec: ModelSpec) -> dict[str, str]:
    """Return our names of the tensors that a model has, by the names that the file must use."""
    names = {
        theirs: ours
        for theirs, ours in MODEL_TENSORS.items()
        if not (ours == "lm_head" and spec.tied_embeddings)
    }
    for layer in range(spec.num_layers):
        names |= {f"blk.{layer}.{k}": f"layers.{layer}.{v}" for k, v in LAYER_TENSORS.items()}
    return names


def _refuse_variants(header: GgufHeader) -> None:
    """Raise for a Llama variant whose arithmetic is not ours."""
    if experts := _optional(header, "llama.expert_count", 0):
        raise _unsupported(header, f"a mixture of {experts} experts")
    scaling = _optional(header, "llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in header.tensors:
        kind = scaling if scaling != "none" else "by frequency (rope_freqs.weight)"
        raise _unsupported(header, f"scaled rotation: {kind}")
    if window := _optional(header, "llama.attention.sliding_window", 0):
        raise _unsupported(header, f"a sliding window of {window} tokens")


def _special_ids(header: GgufHeader) -> tuple[int | None, tuple[int, ...]]:
    """Return the id that begins a text, and those that end one, lowest first."""
    bos_id = _optional(header, "tokenizer.ggml.bos_token_id", -1)
    ends = {
        _optional(header, f"tokenizer.ggml.{key}_token_id", -1) for key in ("eos", "eot", "eom")
    }
    return (bos_id if bos_id >= 0 else None), tuple(sorted(ends - {-1}))


def _unsupported(header: GgufHeader, what: str) -> ModelFileError:
    return ModelFileError(
        header.path, f"needs {what}, which this version cannot run", hint=UNSUPPORTED_HINT
    )


def _require(header: GgufHeader, key: str, kind: type[V]) -> V:
    if key not in header.metadata:
        raise ModelFileError(header.path, f"lacks the value {key!r}", hint=UNSUPPORTED_HINT)
    value = header.metadata[key]
    # bool is a kind of int to Python, but not to the file.
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ModelFileError(
            header.path, f"has {key!r} of type {type(value).__name__}, not {kind.__name__}"
        )
    return value


def _array(header: GgufHeader, key: str, kind: type[S]) -> tuple[S, ...]:
    values: tuple[Value, ...] = _require(header, key, tuple)
    items = tuple([value for value in values if isinstance(value, kind)])
    if len(items) != len(values):
        raise ModelFileError(header.path, f"has {key!r} of other values than {kind.__name__}")
    return items


def _optional(header: GgufHeader, key: str, default: V) -> V:
    return _require(header, key, type(default)) if key in header.metadata else default


def _decimal(value: float) -> float:
    """Undo the file's single precision: 1e-5 was meant, and 9.999999747378752e-06 was stored."""
    return float(f"{value:.6g}")
