"""RMSNorm against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from shared.ops.norm import add_rms_norm, rms_norm

EPS = 1e-5


def definition(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rows_are_scaled_to_unit_mean_square(num_tokens: int, size: float) -> None:
    """At tiny rows `eps` decides, so it must be added where the definition adds it."""
    torch.manual_seed(0)
    x, weight = torch.randn(num_tokens, 96) * size, torch.randn(96)
    expected = definition(x, weight).float()
    torch.testing.assert_close(rms_norm(x, weight, EPS), expected, rtol=1e-5, atol=1e-6)


def test_bfloat16_rows_are_normed_in_float32() -> None:
    """Rounded once, at the end: within half a step of bfloat16 of the exact result."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 576).bfloat16(), torch.randn(576)
    normed = rms_norm(x, weight, EPS)
    assert normed.dtype == torch.bfloat16
    torch.testing.assert_close(normed.double(), definition(x, weight), rtol=2**-8, atol=0)


def test_the_residual_keeps_the_sum() -> None:
    """The next half of the layer adds to it."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(2, 32), torch.randn(2, 32), torch.randn(32)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, EPS))
