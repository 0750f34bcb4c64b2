"""What a Hugging Face directory says of its model, and what is refused by name."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from shared.model.errors import ModelFileError
from shared.model.hub_config import (
    FAMILIES,
    read_hub_spec,
    read_hub_special_tokens,
    read_hub_template,
)
from shared.model.spec import ModelSpec, RopeScaling

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def write(folder: Path, name: str = "config.json", **values: object) -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


def spec_of(folder: Path, **changes: object) -> ModelSpec:
    return read_hub_spec(write(folder, **LLAMA | changes))


def test_what_a_short_file_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    assert spec_of(tmp_path) == ModelSpec(
        name=tmp_path.name,
        architecture="llama",
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=96,
        vocab_size=100,
        max_context_tokens=4096,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        tied_embeddings=False,
        bos_id=None,
        eos_ids=(),
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaForCausalLM", {"architecture": "llama", "head_dim": 16}),
        ("MistralForCausalLM", {"architecture": "mistral", "sliding_window": 512}),
        ("Qwen2ForCausalLM", {"architecture": "qwen2", "qkv_bias": True, "sliding_window": None}),
        ("Qwen3ForCausalLM", {"architecture": "qwen3", "qk_norm": True, "head_dim": 128}),
    ],
)
def test_a_family_is_some_fields(tmp_path: Path, name: str, fields: dict[str, object]) -> None:
    """Nothing else in the program asks which family a model is of."""
    window = {} if name.startswith("Llama") else {"sliding_window": 512}
    spec = spec_of(tmp_path, architectures=[name], **window)
    assert {field: getattr(spec, field) for field in fields} == fields


@pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
def test_the_scaling_is_read_from_old_files_and_new_ones(tmp_path: Path, where: str) -> None:
    base = {"rope_theta": 500_000.0}
    if where == "rope_scaling":
        spec = spec_of(tmp_path, rope_scaling=SCALING, **base)
    else:
        spec = spec_of(tmp_path, rope_parameters=SCALING | base)
    assert spec.rope_theta == 500_000.0
    assert spec.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
    )


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4096}, None),
        ({"sliding_window": 4095}, 4095),
        ({"sliding_window": None}, None),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 3}, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, 8),
    ],
)
def test_a_window_that_no_context_reaches_is_none(
    tmp_path: Path, changes: dict[str, object], window: int | None
) -> None:
    spec = spec_of(tmp_path, architectures=["MistralForCausalLM"], **changes)
    assert spec.sliding_window == window


def test_qwen_s_window_has_a_switch_of_its_own(tmp_path: Path) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 8, "max_window_layers": 0}
    assert spec_of(tmp_path, **qwen).sliding_window is None
    assert spec_of(tmp_path, **qwen, use_sliding_window=True).sliding_window == 8
    none = qwen | {"max_window_layers": 3}
    assert spec_of(tmp_path, **none, use_sliding_window=True).sliding_window is None


def test_ends_for_generation_go_before_the_model_s_own(tmp_path: Path) -> None:
    """Chat models end turns by tokens that only `generation_config.json` names."""
    assert spec_of(tmp_path, eos_token_id=7).eos_ids == (7,)
    write(tmp_path, "generation_config.json", eos_token_id=[9, 8, 9])
    assert spec_of(tmp_path, eos_token_id=7, bos_token_id=1).eos_ids == (8, 9)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, f"a GPT2LMHeadModel; .*{', '.join(FAMILIES)}"),
        ({"architectures": []}, "must name one class in `architectures`"),
        ({"architectures": None}, "must name one class in `architectures`"),
        ({"hidden_size": None}, "lacks `hidden_size`"),
        ({"hidden_size": "64"}, "has `hidden_size` of type str, not int"),
        ({"num_hidden_layers": True}, "has `num_hidden_layers` of type bool, not int"),
        ({"num_attention_heads": 0}, "`num_heads` is 0; it must be at least 1"),
        ({"num_key_value_heads": 3}, "`num_kv_heads` is 3, which does not divide 4 heads"),
        ({"attention_bias": True}, "needs `attention_bias`, which this version cannot run"),
        ({"mlp_bias": True}, "needs `mlp_bias`, which this version cannot run"),
        ({"hidden_act": "gelu"}, r"needs the activation 'gelu' \(known are: silu\)"),
        ({"partial_rotary_factor": 0.5}, "needs `partial_rotary_factor` 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, "needs weights quantised by 'awq'"),
        ({"rope_scaling": {"type": "yarn"}}, "rotation by 'yarn'; known are: default, llama3"),
        ({"rope_scaling": SCALING | {"factor": None}}, "lacks `rope_scaling.factor`"),
        ({"rope_scaling": 3}, "has `rope_scaling` of type int, not object"),
        ({"rope_scaling": SCALING | {"factor": -1.0}}, "`rope_scaling.factor` is -1.0"),
        ({"eos_token_id": "x"}, "has `eos_token_id` that is no token id: 'x'"),
        ({"eos_token_id": 100}, "`eos_ids` has 100, outside a vocabulary of 100"),
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "in 1 of 3",
        ),
        ({"sliding_window": 8, "layer_types": ["chunked"]}, "`layer_types` of other kinds"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], fault: str
) -> None:
    """Before any weight is read, and with what would run."""
    with pytest.raises(ModelFileError, match=rf"config\.json: .*{fault}"):
        spec_of(tmp_path, **changes)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json: is no JSON"):
        read_hub_spec(tmp_path)


def test_a_directory_without_a_configuration_is_named(tmp_path: Path) -> None:
    says = re.escape(f"{tmp_path / 'config.json'}: no such file")
    with pytest.raises(ModelFileError, match=says):
        read_hub_spec(tmp_path)


# --- templates and special tokens --------------------------------------------------------------


def test_a_template_is_a_file_or_a_value(tmp_path: Path) -> None:
    """The file goes before, as in transformers."""
    assert read_hub_template(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", chat_template="value")
    assert read_hub_template(tmp_path) == "value"
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", chat_template=several)
    assert read_hub_template(tmp_path) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert read_hub_template(tmp_path) == "file"


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", chat_template=3)
    with pytest.raises(ModelFileError, match="`chat_template` that is no text"):
        read_hub_template(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(ModelFileError, match=r"chat_template\.jinja: is not UTF-8 \(byte 0\)"):
        read_hub_template(tmp_path)
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(ModelFileError, match="is larger than 1024 KiB"):
        read_hub_template(tmp_path)


def test_special_tokens_are_texts_or_objects(tmp_path: Path) -> None:
    write(tmp_path, "special_tokens_map.json", bos_token="<s>", eos_token="old")
    write(tmp_path, "tokenizer_config.json", eos_token={"content": "</s>"}, pad_token=None)
    assert read_hub_special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
