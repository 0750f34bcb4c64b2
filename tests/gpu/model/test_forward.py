"""The forward pass on a GPU: prefill and decode agree, with each other and with the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.model_checks import (
    FAMILIES,
    check_decode_follows_prefill,
    check_device_equals_cpu,
    check_output_rows,
    check_padded_step,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_decoded_tokens_equal_prefilled_ones(dtype: torch.dtype, family: str) -> None:
    """Over both pools, with a padding row."""
    check_decode_follows_prefill(dtype, "cuda", family=family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family_s_logits_are_a_cpu_s(dtype: torch.dtype, family: str) -> None:
    """Biases, norms of heads and scaled rotations go through the same kernels."""
    check_device_equals_cpu(dtype, "cuda", family)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_wanted_rows_leave_the_last_layer(dtype: torch.dtype) -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_of_fixed_size_is_a_plain_one(dtype: torch.dtype) -> None:
    """Several prompts, then more of one of them, with padding behind."""
    check_padded_step(dtype, "cuda")
