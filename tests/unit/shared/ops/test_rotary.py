"""Rotary embedding against rotations of points in a plane."""

from __future__ import annotations

import math

import torch

from shared.ops.rotary import apply_rotary, rotary_angles

WAVELENGTHS = torch.tensor([1.0, 0.1, 0.003])


def test_each_pair_turns_by_its_own_angle() -> None:
    """Dimension i and i + head_dim / 2 are x and y of one point."""
    torch.manual_seed(0)
    positions = [0, 1, 5, 3000]
    x = torch.randn(len(positions), 2, 6)
    turned = apply_rotary(x, *rotary_angles(torch.tensor(positions), WAVELENGTHS))
    for row, position in enumerate(positions):
        for pair, speed in enumerate(WAVELENGTHS.tolist()):
            angle = position * speed
            a, b = x[row, :, pair], x[row, :, pair + 3]
            expected_a = a * math.cos(angle) - b * math.sin(angle)
            expected_b = b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(turned[row, :, pair], expected_a, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(turned[row, :, pair + 3], expected_b, rtol=1e-3, atol=1e-3)


def test_bfloat16_heads_are_turned_in_float32() -> None:
    """At position 3,000 an angle in bfloat16 would be off by whole turns."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6).bfloat16()
    angles = rotary_angles(torch.tensor([3000]), WAVELENGTHS)
    assert torch.equal(apply_rotary(x, *angles), apply_rotary(x.float(), *angles).bfloat16())


def test_the_input_is_left_alone() -> None:
    """It is a view of the fused product, whose values part is still to be written."""
    x = torch.ones(1, 1, 6)
    apply_rotary(x, *rotary_angles(torch.tensor([3]), WAVELENGTHS))
    assert torch.equal(x, torch.ones(1, 1, 6))
