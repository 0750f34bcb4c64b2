"""Decoding in fixed tensors against the forward pass, on the CPU; `tests/gpu` does it on a GPU."""

from __future__ import annotations

import torch

from tests.gpu.model_checks import check_decode_follows_prefill, check_output_rows


def test_decoded_tokens_equal_prefilled_ones() -> None:
    """Over both pools, with a padding row; what is written must be what attention reads."""
    check_decode_follows_prefill(torch.float32, "cpu")


def test_only_the_wanted_rows_leave_the_last_layer() -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(torch.float32, "cpu")
