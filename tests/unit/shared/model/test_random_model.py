"""Models of a named shape: their sizes, their seeds, their text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.model.errors import UnknownModelError
from shared.model.llama import Llama
from shared.model.loader import load_model
from shared.model.random_model import SHAPES, byte_tokenizer, find_shape, random_tensors

SMALL = replace(SHAPES["smollm2-135m"], num_layers=3, vocab_size=300)


def test_a_named_shape_loads_like_a_file() -> None:
    """A daemon is configured with nothing but another `model.path`."""
    model = load_model("random:smollm2-135m", "bfloat16")
    assert model.spec.num_layers == 30
    assert model.chat_template is None
    assert sum(tensor.numel() for tensor in model.tensors.values()) == model.spec.num_parameters
    assert {tensor.dtype for tensor in model.tensors.values()} == {torch.bfloat16}
    assert "smollm2-135m" in model.content_id


def test_the_large_shapes_have_the_sizes_of_their_models() -> None:
    """A benchmark of another shape would be another benchmark."""
    assert SHAPES["llama-3.1-8b"].num_parameters == 8_030_261_248
    assert SHAPES["llama-3-70b"].num_parameters == 70_553_706_496
    assert SHAPES["llama-3.1-8b"].kv_bytes_per_token("bfloat16") == 131_072
    assert SHAPES["llama-3-70b"].kv_bytes_per_token("bfloat16") == 327_680


def test_weights_are_the_same_in_every_process() -> None:
    """Both daemons make their own, and one goes on where the other stopped."""

    def make() -> dict[str, torch.Tensor]:
        return random_tensors(SMALL, dtype=torch.float32, device="cpu")

    first, second = make(), make()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["layers.0.q"], first["layers.1.q"])


def test_shared_layers_take_the_memory_of_one() -> None:
    """Fusing must not make a copy for each of them."""
    tensors = random_tensors(SMALL, dtype=torch.float32, device="cpu", share_layers=True)
    model = Llama(SMALL, tensors)
    assert tensors == {}
    assert len({layer.qkv.data_ptr() for layer in model._layers}) == 1


def test_any_text_survives_the_byte_tokenizer() -> None:
    """One token a byte, so a benchmark knows how long its prompt is."""
    tokenizer = byte_tokenizer(SMALL)
    text = "Grüße,\n\x00 1234"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == SMALL.vocab_size
    assert tokenizer.decode([299]) == "<299>"


def test_an_unknown_shape_is_refused_with_those_that_there_are() -> None:
    """The name is typed by hand."""
    with pytest.raises(UnknownModelError, match="no shape is called 'llama'") as caught:
        find_shape("random:llama")
    assert "random:llama-3.1-8b" in str(caught.value.hint)
