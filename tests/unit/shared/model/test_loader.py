"""A whole model, loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model.errors import ModelFileError
from shared.model.gguf_file import content_id, read_header
from shared.model.loader import load_model_file
from tests.support.tiny_gguf import TinyGguf


def test_a_loaded_model_has_all_its_parts(tiny_file: Path) -> None:
    """Shape, weights, tokenizer, template and identity come from one file."""
    model = load_model_file(tiny_file, "float32")
    assert model.spec.name == "tiny"
    assert model.tensors["embed"].shape == (model.spec.vocab_size, model.spec.hidden_size)
    assert model.tokenizer.decode(model.tokenizer.encode("hello")) == "hello"
    assert model.content_id == content_id(read_header(tiny_file))
    assert model.chat_template is not None
    try:
        assert model.chat_template.render([{"role": "user", "content": "hi"}]) == "user: hi\n"
    finally:
        model.chat_template.close()


def test_a_template_knows_the_model_s_special_tokens(tmp_path: Path) -> None:
    """Many templates begin with `{{ bos_token }}`."""
    source = "{{ bos_token }}|{{ eos_token }}"
    recipe = TinyGguf(metadata={"tokenizer.chat_template": (source, GGUFValueType.STRING)})
    template = load_model_file(recipe.write(tmp_path / "m.gguf"), "float32").chat_template
    assert template is not None
    try:
        assert template.render([]) == "<|start|>|<|end|>"
    finally:
        template.close()


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    """A base model only continues text."""
    recipe = TinyGguf()
    del recipe.metadata["tokenizer.chat_template"]
    assert load_model_file(recipe.write(tmp_path / "m.gguf"), "float32").chat_template is None


def test_a_tokenizer_that_cannot_be_built_costs_no_reading_of_weights(tmp_path: Path) -> None:
    """With a large model the user would wait a minute to be told."""
    recipe = TinyGguf(metadata={"tokenizer.ggml.pre": ("mystery", GGUFValueType.STRING)})
    with pytest.raises(ModelFileError, match="'mystery'"):
        load_model_file(
            recipe.write(tmp_path / "m.gguf"),
            "float32",
            progress=lambda *_: pytest.fail("weights were read"),
        )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(damage=st.binary(min_size=1, max_size=40), at=st.integers(min_value=0))
def test_a_damaged_header_is_a_named_error_or_does_no_harm(
    tmp_path: Path, damage: bytes, at: int
) -> None:
    """Whatever the bytes, nothing but `ModelFileError` comes out of loading, in one line."""
    whole, damaged = tmp_path / "whole.gguf", tmp_path / "damaged.gguf"
    if not whole.exists():
        TinyGguf().write(whole)
    data = bytearray(whole.read_bytes())
    at %= read_header(whole).data_offset_bytes
    data[at : at + len(damage)] = damage
    damaged.write_bytes(data)
    try:
        load_model_file(damaged, "float32")
    except ModelFileError as error:
        told = str(error)
    else:
        told = ""
    assert "\n" not in told


@pytest.mark.model
def test_loading_needs_little_more_memory_than_the_weights(smollm2_file: Path) -> None:
    """At most 1.2 times what is kept, so a machine that can run a model can also load it."""
    program = f"""
import json, resource
from pathlib import Path
from shared.model import weights
from shared.model.gguf_file import read_header
from shared.model.gguf_model import read_spec
header = read_header(Path({str(smollm2_file)!r}))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
kept = weights.load_weights(header, read_spec(header), "bfloat16")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([(peak - before) * 1024, sum(t.nbytes for t in kept.values())]))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    grown_bytes, kept_bytes = json.loads(output)
    assert kept_bytes == 269_030_016
    assert grown_bytes <= 1.2 * kept_bytes
