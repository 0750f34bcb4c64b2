"""Which weights a model has."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shared.model.tensors import tensor_shapes
from tests.support.tiny_llama import random_tensors, tiny_spec


@pytest.mark.parametrize("changes", [{}, {"qkv_bias": True}, {"qk_norm": True}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_list_adds_up_to_the_number_of_weights(changes: dict[str, bool], tied: bool) -> None:
    """The spec counts by its own formula."""
    spec = replace(tiny_spec(tied_embeddings=tied), **changes)  # type: ignore[arg-type]  # one flag
    assert sum(map(math.prod, tensor_shapes(spec).values())) == spec.num_parameters


def test_the_list_is_what_a_model_is_built_of() -> None:
    spec = tiny_spec()
    made = {name: tuple(tensor.shape) for name, tensor in random_tensors(spec).items()}
    assert made == tensor_shapes(spec)
