"""The numbers of a model: what they refuse and what they cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shared.model.errors import InvalidSpecError
from shared.model.spec import ModelSpec, RopeScaling

SMOLLM2 = ModelSpec(
    name="SmolLM2",
    architecture="llama",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49_152,
    max_context_tokens=8192,
    rope_theta=100_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("architecture", "mamba", "is 'mamba'; this version runs: llama, mistral, qwen2, qwen3"),
        ("num_layers", 0, "is 0; it must be at least 1"),
        ("vocab_size", -1, "is -1; it must be at least 1"),
        ("num_kv_heads", 2, "is 2, which does not divide 9 heads"),
        ("head_dim", 63, "is 63; rotation needs an even number"),
        ("rope_theta", 0.0, "is 0.0; it must be finite and above 0"),
        ("rms_norm_eps", float("nan"), "is nan; it must be finite and above 0"),
        ("sliding_window", 0, "is 0; it must be at least 1"),
        ("bos_id", 49_152, "has 49152, outside a vocabulary of 49152"),
        ("eos_ids", (2, -1), "has -1, outside a vocabulary of 49152"),
    ],
)
def test_a_shape_that_cannot_run_is_refused_by_its_field(
    field: str, value: object, fault: str
) -> None:
    """The name of the field is what leads to the fault in a file or a program."""
    with pytest.raises(InvalidSpecError, match=f"`{field}` ") as caught:
        replace(SMOLLM2, **{field: value})
    assert str(caught.value) == f"`{field}` {fault}"


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", 23_040), ("float16", 23_040), ("float32", 46_080)]
)
def test_kv_bytes_a_token_count_keys_and_values_of_all_layers(dtype: str, expected: int) -> None:
    """2 x 30 layers x 3 heads x 64 numbers, of 2 or 4 bytes."""
    assert SMOLLM2.kv_bytes_per_token(dtype) == expected


def test_kv_bytes_of_an_unknown_type_are_refused() -> None:
    """A guess would size a pool wrongly."""
    with pytest.raises(InvalidSpecError, match="`dtype` is 'int8'; known are: float32, bfl"):
        SMOLLM2.kv_bytes_per_token("int8")


def test_parameters_count_tied_embeddings_once() -> None:
    """SmolLM2-135M has 134.5 million weights; untied it would have one more matrix."""
    assert SMOLLM2.num_parameters == 134_515_008
    untied = replace(SMOLLM2, tied_embeddings=False)
    assert untied.num_parameters - SMOLLM2.num_parameters == 49_152 * 576


def test_fingerprint_fields_leave_out_only_the_name() -> None:
    """A renamed file is the same model; anything else makes another one."""
    fields = SMOLLM2.fingerprint_fields()
    assert set(fields) == set(SMOLLM2.__slots__) - {"name"}
    assert fields == replace(SMOLLM2, name="other").fingerprint_fields()
    assert fields != replace(SMOLLM2, rope_theta=10_000.0).fingerprint_fields()


def test_fingerprint_fields_survive_a_wire() -> None:
    """They travel in the hand-shake, so they must be what they were on the other side."""
    fields = SMOLLM2.fingerprint_fields()
    assert json.loads(json.dumps(fields)) == fields


def test_biases_and_norms_of_heads_are_counted() -> None:
    """What a family adds is part of the weights."""
    plain = SMOLLM2.num_parameters
    assert replace(SMOLLM2, qkv_bias=True).num_parameters == plain + 30 * 64 * (9 + 2 * 3)
    assert replace(SMOLLM2, qk_norm=True).num_parameters == plain + 30 * 2 * 64


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"factor": 0.0}, "`rope_scaling.factor` is 0.0"),
        ({"low_freq_factor": float("nan")}, "`rope_scaling.low_freq_factor` is nan"),
        ({"high_freq_factor": 1.0}, "`rope_scaling.high_freq_factor` is 1.0; it must be above"),
        ({"original_context_tokens": 0}, "`rope_scaling.original_context_tokens` is 0"),
    ],
)
def test_a_scaling_that_cannot_be_is_refused(changes: dict[str, float], fault: str) -> None:
    fields = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_tokens": 8192,
    }
    with pytest.raises(InvalidSpecError, match=fault):
        RopeScaling(**fields | changes)  # type: ignore[arg-type]  # one field at a time
