"""What both daemons must have in common, and how a difference is named."""

from __future__ import annotations

import dataclasses

import pytest

from shared.daemon.fingerprint import fingerprint, fingerprint_fields, first_difference
from shared.kv.layout import KVLayout
from shared.model.spec import ModelSpec

SPEC = ModelSpec(
    name="tiny",
    architecture="llama",
    num_layers=2,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    intermediate_size=16,
    vocab_size=32,
    max_context_tokens=64,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    tied_embeddings=True,
    bos_id=1,
    eos_ids=(2,),
)
LAYOUT = KVLayout(
    num_blocks=8, num_layers=2, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32"
)


def fields_of(spec: ModelSpec = SPEC, layout: KVLayout = LAYOUT, content_id: str = "c") -> dict:
    return fingerprint_fields(spec=spec, content_id=content_id, layout=layout)


def test_equal_models_have_equal_fingerprints_whatever_the_pools_size() -> None:
    assert fields_of() == fields_of(layout=LAYOUT.with_num_blocks(99))
    assert first_difference(fields_of(), fields_of()) is None


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"rope_theta": 500_000.0}, "model_rope_theta"),
        ({"rms_norm_eps": 1e-6}, "model_rms_norm_eps"),
        ({"eos_ids": (2, 3)}, "model_eos_ids"),
        ({"num_layers": 3}, "model_num_layers"),
    ],
)
def test_each_field_of_the_model_counts_and_is_named(change: dict, name: str) -> None:
    """A healthy server with wrong answers is what a forgotten field would give."""
    other = fields_of(spec=dataclasses.replace(SPEC, **change))
    assert first_difference(fields_of(), other) == name
    assert fingerprint(fields_of()) != fingerprint(other)


@pytest.mark.parametrize("change", [{"block_size": 8}, {"dtype": "bfloat16"}, {"head_dim": 8}])
def test_each_field_of_the_layout_counts(change: dict) -> None:
    other = fields_of(layout=dataclasses.replace(LAYOUT, **change))
    assert first_difference(fields_of(), other) == f"kv_{next(iter(change))}"


def test_a_field_that_one_side_lacks_is_a_difference() -> None:
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == "b"


def test_weights_that_differ_in_content_alone_are_told_apart() -> None:
    assert first_difference(fields_of(), fields_of(content_id="d")) == "model_content"
