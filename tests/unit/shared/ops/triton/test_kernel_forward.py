"""The GPU's forward pass, kernels and all, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from shared.ops.triton.forward_ops import TritonOps
from tests.gpu.model_checks import FAMILIES, check_decode_follows_prefill, check_output_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_tokens_equal_prefilled_ones(family: str) -> None:
    """Over both pools, with a padding row; with biases, norms of heads, a scaled rotation."""
    check_decode_follows_prefill(
        torch.float32, "cpu", TritonOps(torch.device("cpu")), family=family
    )


def test_only_the_wanted_rows_leave_the_last_layer() -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(torch.float32, "cpu", TritonOps(torch.device("cpu")))
