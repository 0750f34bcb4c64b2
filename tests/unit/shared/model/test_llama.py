"""The forward pass against transformers' on a tiny model with random weights."""

from __future__ import annotations

import pytest
import torch

from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from tests.support.tiny_llama import random_tensors, tiny_spec
from tests.support.transformers_reference import llama_for_causal_lm, teacher_forced_logits

TOKEN_IDS = torch.randint(97, (45,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("tied_embeddings", [True, False])
def test_logits_equal_those_of_transformers(tied_embeddings: bool) -> None:
    """All of it at once: fusing, grouping, rotation, norms, gate, paging, output projection."""
    spec = tiny_spec(tied_embeddings=tied_embeddings)
    tensors = random_tensors(spec)
    expected = teacher_forced_logits(llama_for_causal_lm(spec, tensors), TOKEN_IDS)
    engine = LocalEngine(Llama(spec, tensors), num_blocks=8, block_size=8, fill=float("nan"))
    torch.testing.assert_close(engine.prompt_logits(TOKEN_IDS), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_weights_give_float32_logits_nearby() -> None:
    """Rounding the weights moves logits of size 1 by hundredths, not more."""
    spec = tiny_spec()
    exact = LocalEngine(Llama(spec, random_tensors(spec)), num_blocks=8, block_size=8)
    rounded_tensors = {name: t.bfloat16() for name, t in random_tensors(spec).items()}
    rounded = LocalEngine(
        Llama(spec, rounded_tensors), num_blocks=8, block_size=8, fill=float("nan")
    )
    logits, expected = rounded.prompt_logits(TOKEN_IDS), exact.prompt_logits(TOKEN_IDS)
    assert logits.dtype == torch.float32
    assert float((logits - expected).abs().mean()) < 0.02 * float(expected.abs().mean())


def test_weights_are_taken_out_as_they_are_fused() -> None:
    """What stayed behind would keep a second copy of the model alive."""
    spec = tiny_spec(tied_embeddings=False)
    tensors = random_tensors(spec)
    Llama(spec, tensors)
    assert tensors == {}


def test_a_missing_weight_is_named() -> None:
    """The loader checks files; this catches a loader that forgets a tensor."""
    spec = tiny_spec()
    tensors = random_tensors(spec)
    del tensors["layers.1.up"]
    with pytest.raises(KeyError, match=r"layers\.1\.up"):
        Llama(spec, tensors)
