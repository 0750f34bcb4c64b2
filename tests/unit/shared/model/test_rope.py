"""Wavelengths of the rotary embedding."""

from __future__ import annotations

import pytest

from shared.model.rope import inverse_wavelengths


def test_speeds_fall_geometrically_from_one_radian_a_position() -> None:
    """The first pair turns by 1 a position, the last by nearly 1 / theta."""
    speeds = inverse_wavelengths(8, 10_000.0).tolist()
    assert speeds == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-6)
