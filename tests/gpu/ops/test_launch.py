"""Launches past Triton's own look at every argument, on a GPU."""

from __future__ import annotations

import pytest
import torch

from shared.ops.norm import rms_norm as reference
from shared.ops.triton.norm import rms_norm

pytestmark = pytest.mark.gpu


def test_a_kernel_launched_again_looks_at_its_new_arguments() -> None:
    """Another type, another width or an address that is not aligned is another kind of launch."""
    torch.manual_seed(0)
    for _ in range(3):
        for dtype in (torch.bfloat16, torch.float32):
            for width in (576, 4_096):
                x = torch.randn(5 * width + 1, device="cuda").to(dtype)
                weight = torch.rand(width, device="cuda")
                for rows in (x[:-1].view(5, width), x[1:].view(5, width)):
                    out = rms_norm(rows, weight, 1e-5)
                    torch.testing.assert_close(out, reference(rows, weight, 1e-5))
