"""Decoding in fixed tensors against the forward pass, on the CPU; `tests/gpu` does it on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.model_checks import (
    FAMILIES,
    check_decode_follows_prefill,
    check_device_equals_cpu,
    check_output_rows,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_tokens_equal_prefilled_ones(family: str) -> None:
    """Over both pools, with a padding row; what is written must be what attention reads."""
    check_decode_follows_prefill(torch.float32, "cpu", family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_gives_what_float32_gives_up_to_its_rounding(family: str) -> None:
    check_device_equals_cpu(torch.bfloat16, "cpu", family)


def test_only_the_wanted_rows_leave_the_last_layer() -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(torch.float32, "cpu")
