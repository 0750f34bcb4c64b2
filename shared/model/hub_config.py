"""Tells from a Hugging Face directory what model it holds: its shape and its chat template.

Read are `config.json`, `generation_config.json`, `tokenizer_config.json` and the chat template.
What the forward pass could not run exactly is refused by name here, before any weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import InvalidSpecError, ModelFileError
from shared.model.json_file import JsonFields, read_json, read_json_if_there
from shared.model.spec import ModelSpec, RopeScaling

UNSUPPORTED_HINT = "choose another model, or a GGUF file of it"

MAX_TEMPLATE_BYTES = 1 << 20
"""Longest chat template: the longest in use, with tools and all, have 20 kB."""

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
"""Tokens that chat templates know by these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What sets one class of transformers apart, in a spec's terms."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    """Where `config.json` names none; None for `hidden_size / num_attention_heads`."""
    has_window_switch: bool = False
    """`sliding_window` counts only with `use_sliding_window`."""


FAMILIES = {
    "LlamaForCausalLM": Family(architecture="llama"),
    "MistralForCausalLM": Family(architecture="mistral"),
    "Qwen2ForCausalLM": Family(architecture="qwen2", qkv_bias=True, has_window_switch=True),
    "Qwen3ForCausalLM": Family(
        architecture="qwen3", qk_norm=True, head_dim=128, has_window_switch=True
    ),
}
"""Every class of transformers that this version runs, by the name in `config.json`."""


def read_hub_spec(folder: Path) -> ModelSpec:
    """Return the shape of the model in a directory.

    Raises:
        ModelFileError: A file is missing or damaged, or the model is one that we cannot run.
    """
    config = read_json(folder / "config.json")
    family = _family(config)
    _refuse_variants(config)
    num_heads = config.require("num_attention_heads", int)
    hidden_size = config.require("hidden_size", int)
    max_context_tokens = config.require("max_position_embeddings", int)
    bos_ids = config.ids("bos_token_id")
    try:
        theta, scaling = _rotation(config)
        return ModelSpec(
            name=folder.name,
            architecture=family.architecture,
            num_layers=config.require("num_hidden_layers", int),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.optional("num_key_value_heads", num_heads),
            head_dim=config.optional(
                "head_dim", family.head_dim or hidden_size // max(num_heads, 1)
            ),
            intermediate_size=config.require("intermediate_size", int),
            vocab_size=config.require("vocab_size", int),
            max_context_tokens=max_context_tokens,
            rope_theta=theta,
            rms_norm_eps=config.optional("rms_norm_eps", 1e-6),
            tied_embeddings=config.optional("tie_word_embeddings", False),
            bos_id=bos_ids[0] if bos_ids else None,
            eos_ids=_eos_ids(config, folder),
            rope_scaling=scaling,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=_window(config, family, max_context_tokens),
        )
    except InvalidSpecError as error:
        raise config.fail(str(error), hint=UNSUPPORTED_HINT) from error


def read_hub_template(folder: Path) -> str | None:
    """Return the Jinja source of the model's chat template, or None when it has none.

    Raises:
        ModelFileError: It cannot be read, or is no text.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            if path.stat().st_size > MAX_TEMPLATE_BYTES:
                raise ModelFileError(path, f"is larger than {MAX_TEMPLATE_BYTES >> 10} KiB")
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ModelFileError(path, f"is not UTF-8 (byte {error.start})") from error
    config = read_json_if_there(folder / "tokenizer_config.json")
    template = config.values.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry for entry in template if isinstance(entry, dict)}
        template = named.get("default", {}).get("template")
    if template is None:
        return None
    if not isinstance(template, str) or len(template) > MAX_TEMPLATE_BYTES:
        raise config.fail("has a `chat_template` that is no text, or too much of it")
    return template


def read_hub_special_tokens(folder: Path) -> dict[str, str]:
    """Return the texts of special tokens, by the names that chat templates call them.

    Raises:
        ModelFileError: A file is damaged.
    """
    texts: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one goes before
        values = read_json_if_there(folder / name).values
        for token in SPECIAL_TOKENS:
            value = values.get(token)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                texts[token] = text
    return texts


def _family(config: JsonFields) -> Family:
    names = config.values.get("architectures")
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise config.fail(f"must name one class in `architectures`; this version runs: {known}")
    if names[0] not in FAMILIES:
        raise config.fail(f"holds a {names[0]}; this version runs: {known}", hint=UNSUPPORTED_HINT)
    return FAMILIES[names[0]]


def _refuse_variants(config: JsonFields) -> None:
    """Raise for a variant whose arithmetic is not ours."""

    def unsupported(what: str) -> ModelFileError:
        return config.fail(f"needs {what}, which this version cannot run", hint=UNSUPPORTED_HINT)

    for name in ("attention_bias", "mlp_bias"):
        if config.optional(name, False):
            raise unsupported(f"`{name}`")
    if (activation := config.optional("hidden_act", "silu")) not in ("silu", "swish"):
        raise unsupported(f"the activation {activation!r} (known are: silu)")
    if (share := config.optional("partial_rotary_factor", 1.0)) != 1:
        raise unsupported(f"`partial_rotary_factor` {share:g}")
    if (quantised := config.child("quantization_config")) is not None:
        method = quantised.optional("quant_method", "unknown")
        raise unsupported(f"weights quantised by {method!r}")


def _rotation(config: JsonFields) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling; newer files keep both in `rope_parameters`."""
    fields = config.child("rope_parameters") or config.child("rope_scaling")
    theta = config.optional("rope_theta", 10_000.0)
    if fields is None:
        return theta, None
    theta = fields.optional("rope_theta", theta)
    kind = fields.optional("rope_type", fields.optional("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise config.fail(
            f"scales its rotation by {kind!r}; known are: default, llama3", hint=UNSUPPORTED_HINT
        )
    return theta, RopeScaling(
        factor=fields.require("factor", float),
        low_freq_factor=fields.require("low_freq_factor", float),
        high_freq_factor=fields.require("high_freq_factor", float),
        original_context_tokens=fields.require("original_max_position_embeddings", int),
    )


def _window(config: JsonFields, family: Family, max_context_tokens: int) -> int | None:
    """Return the sliding window; one that no context reaches is none."""
    if family.has_window_switch and not config.optional("use_sliding_window", False):
        return None
    if "sliding_window" not in config:
        return None
    window = config.require("sliding_window", int)
    if window >= max_context_tokens:
        return None
    num_layers = config.require("num_hidden_layers", int)
    if "layer_types" in config:
        kinds = config.values["layer_types"]
        num_windowed = kinds.count("sliding_attention") if isinstance(kinds, list) else -1
        is_known = isinstance(kinds, list) and set(kinds) <= {"sliding_attention", "full_attention"}
        if not is_known:
            raise config.fail("has `layer_types` of other kinds than full and sliding attention")
    elif family.has_window_switch:
        num_windowed = num_layers - min(config.optional("max_window_layers", 28), num_layers)
    else:
        num_windowed = num_layers
    if num_windowed == 0:
        return None
    if num_windowed != num_layers:
        raise config.fail(
            f"has a sliding window in {num_windowed} of {num_layers} layers; "
            "this version runs models that have it in all or in none",
            hint=UNSUPPORTED_HINT,
        )
    return window


def _eos_ids(config: JsonFields, folder: Path) -> tuple[int, ...]:
    """Return the ids that end an answer, lowest first; what is meant for generation goes before."""
    generation = read_json_if_there(folder / "generation_config.json")
    ids = generation.ids("eos_token_id") or config.ids("eos_token_id")
    return tuple(sorted(set(ids)))
