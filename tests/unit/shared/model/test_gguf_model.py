"""What model a header describes, and which models are refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFValueType

from shared.model.errors import ModelFileError
from shared.model.gguf_file import read_header
from shared.model.gguf_model import (
    read_chat_template,
    read_spec,
    read_special_tokens,
    read_vocabulary,
    tensor_names,
)
from shared.model.spec import ModelSpec
from shared.model.tensors import tensor_shapes
from tests.support.tiny_gguf import MERGES, TinyGguf, tokens

U32, F32, TEXT = GGUFValueType.UINT32, GGUFValueType.FLOAT32, GGUFValueType.STRING
ARRAY, BOOL = GGUFValueType.ARRAY, GGUFValueType.BOOL


def test_the_spec_is_what_the_file_says(tiny_file: Path) -> None:
    """Every field, and epsilon as it was meant before the file rounded it to single precision."""
    assert read_spec(read_header(tiny_file)) == ModelSpec(
        name="tiny",
        architecture="llama",
        num_layers=1,
        hidden_size=256,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=256,
        vocab_size=len(tokens()),
        max_context_tokens=128,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        bos_id=1,
        eos_ids=(0,),
    )


def test_an_output_matrix_of_its_own_unties_the_embeddings(tmp_path: Path) -> None:
    """The tensor's presence is the only sign there is."""
    recipe = TinyGguf()
    recipe.tensors["output.weight"] = np.zeros((len(tokens()), 256), dtype=np.float32)
    header = read_header(recipe.write(tmp_path / "untied.gguf"))
    assert not read_spec(header).tied_embeddings


def test_what_the_file_leaves_out_has_the_format_s_default(tmp_path: Path) -> None:
    """Files of models without grouped heads leave the number of key heads out, and so on."""
    recipe = TinyGguf()
    for key in ("llama.attention.head_count_kv", "llama.rope.freq_base"):
        del recipe.metadata[key]
    for key in ("general.name", "tokenizer.ggml.bos_token_id", "tokenizer.chat_template"):
        del recipe.metadata[key]
    header = read_header(recipe.write(tmp_path / "bare.gguf"))
    spec = read_spec(header)
    assert (spec.num_kv_heads, spec.rope_theta, spec.name) == (4, 10_000.0, "bare")
    assert spec.bos_id is None
    assert read_chat_template(header) is None
    assert not read_vocabulary(header).add_bos


def test_every_token_that_ends_a_turn_ends_an_answer(tmp_path: Path) -> None:
    """Some models end texts and turns with different tokens."""
    recipe = TinyGguf()
    recipe.metadata["tokenizer.ggml.eot_token_id"] = (5, U32)
    assert read_spec(read_header(recipe.write(tmp_path / "m.gguf"))).eos_ids == (0, 5)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("llama.expert_count", (8, U32), "needs a mixture of 8 experts"),
        ("llama.rope.scaling.type", ("yarn", TEXT), "needs scaled rotation: yarn"),
        ("llama.attention.sliding_window", (4096, U32), "needs a sliding window of 4096 tokens"),
        ("llama.rope.dimension_count", (32, U32), "needs llama.rope.dimension_count = 32"),
        ("llama.attention.value_length", (32, U32), "needs llama.attention.value_length = 32"),
        ("llama.attention.head_count_kv", (3, U32), "`num_kv_heads` is 3, which does not divide"),
        ("llama.attention.head_count", (0, U32), "`num_heads` is 0"),
        ("llama.block_count", (1.5, F32), "has 'llama.block_count' of type float, not int"),
        ("llama.block_count", (True, BOOL), "has 'llama.block_count' of type bool, not int"),
        ("tokenizer.ggml.eos_token_id", (999, U32), "`eos_ids` has 999, outside a vocabulary"),
    ],
)
def test_a_model_that_we_would_compute_wrongly_is_refused(
    tmp_path: Path, key: str, value: tuple[object, GGUFValueType], fault: str
) -> None:
    """A model that loads must be computed as it was trained."""
    recipe = TinyGguf(metadata={key: value})
    header = read_header(recipe.write(tmp_path / "variant.gguf"))
    with pytest.raises(ModelFileError, match=rf"variant\.gguf: {fault}"):
        read_spec(header)


def test_scaled_rotation_is_refused_by_its_tensor_too(tmp_path: Path) -> None:
    """Llama 3.1 files have no key for it, only the table of factors."""
    recipe = TinyGguf(tensors={"rope_freqs.weight": np.ones(32, dtype=np.float32)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=r"scaled rotation: by frequency \(rope_freqs.weight"):
        read_spec(header)


def test_more_layers_than_tensors_are_refused_before_they_are_listed(tmp_path: Path) -> None:
    """A damaged count of four billion would otherwise fill the memory with names."""
    recipe = TinyGguf(metadata={"llama.block_count": ((1 << 32) - 1, U32)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="claims 4294967295 layers with 11 tensors"):
        read_spec(header)


def test_another_architecture_is_refused_with_the_list(tmp_path: Path) -> None:
    """The user learns what would run."""
    header = read_header(TinyGguf().write(tmp_path / "m.gguf", architecture="qwen2"))
    says = "holds the architecture 'qwen2'; of GGUF files this version runs: llama; "
    with pytest.raises(ModelFileError, match=says):
        read_spec(header)


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.context_length", "tokenizer.ggml.tokens"]
)
def test_a_missing_value_is_named(tmp_path: Path, key: str) -> None:
    """There is no sensible default for a shape."""
    recipe = TinyGguf()
    del recipe.metadata[key]
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=f"lacks the value '{key}'"):
        read_spec(header)


def test_the_vocabulary_is_what_the_file_says(tiny_file: Path) -> None:
    """Order is meaning: ids are places in the list, and so are the merges' ranks."""
    vocabulary = read_vocabulary(read_header(tiny_file))
    assert vocabulary.tokens == tuple(tokens())
    assert vocabulary.merges == MERGES
    assert (vocabulary.model, vocabulary.pre, vocabulary.bos_id) == ("gpt2", "smollm", 1)
    assert vocabulary.token_types[:3] == (3, 3, 1)


def test_another_kind_of_tokenizer_is_refused(tmp_path: Path) -> None:
    """SentencePiece splits by another algorithm altogether."""
    recipe = TinyGguf(metadata={"tokenizer.ggml.model": ("llama", TEXT)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(
        ModelFileError, match="a tokenizer of kind 'llama'; this version runs: gpt2"
    ):
        read_vocabulary(header)


def test_token_types_that_do_not_match_the_tokens_are_refused(tmp_path: Path) -> None:
    """The lists are parallel, so a short one would shift every type."""
    recipe = TinyGguf(metadata={"tokenizer.ggml.token_type": ([1, 1], ARRAY)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=r"has \d+ tokens but 2 token types"):
        read_vocabulary(header)


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges"])
def test_lists_of_the_wrong_kind_are_refused(tmp_path: Path, key: str) -> None:
    """The format lets any list hold anything."""
    values = [0.5] * len(tokens())
    recipe = TinyGguf(metadata={f"tokenizer.ggml.{key}": (values, ARRAY)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match=f"has 'tokenizer.ggml.{key}' of other values than"):
        read_vocabulary(header)


def test_special_tokens_have_the_names_that_templates_use(tiny_file: Path) -> None:
    """Templates write `{{ bos_token }}`."""
    assert read_special_tokens(read_header(tiny_file)) == {
        "bos_token": "<|start|>",
        "eos_token": "<|end|>",
    }


def test_a_special_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """It has no text to give."""
    recipe = TinyGguf(metadata={"tokenizer.ggml.padding_token_id": (999, U32)})
    header = read_header(recipe.write(tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="has pad_token 999, outside its"):
        read_special_tokens(header)


def test_every_named_tensor_has_a_shape(tiny_file: Path) -> None:
    """The two tables are read side by side, so neither may have what the other lacks."""
    spec = read_spec(read_header(tiny_file))
    assert sorted(tensor_names(spec).values()) == sorted(tensor_shapes(spec))
