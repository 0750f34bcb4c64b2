"""The GPU's forward pass, kernels and all, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from shared.ops.triton.forward_ops import TritonOps
from tests.gpu.model_checks import (
    FAMILIES,
    check_decode_follows_prefill,
    check_output_rows,
    check_padded_step,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_tokens_equal_prefilled_ones(family: str) -> None:
    """Over both pools, with a padding row; with biases, norms of heads, a scaled rotation."""
    check_decode_follows_prefill(
        torch.float32, "cpu", TritonOps(torch.device("cpu")), family=family
    )


def test_only_the_wanted_rows_leave_the_last_layer() -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(torch.float32, "cpu", TritonOps(torch.device("cpu")))


def test_a_step_of_fixed_size_is_a_plain_one() -> None:
    """Several prompts, then more of one of them, with padding behind."""
    check_padded_step(torch.float32, "cpu", TritonOps(torch.device("cpu")))
