"""Which way blocks are used, and what a user is told about it."""

from __future__ import annotations

import pytest

from decoded.access import choose_access


@pytest.mark.parametrize(
    ("ours", "theirs", "way"),
    [
        ("cpu", "cpu", "pull"),
        ("GPU-1", "GPU-1", "direct"),
        ("GPU-1", "GPU-2", "pull"),
    ],
)
def test_auto_follows_the_devices(ours: str, theirs: str, way: str) -> None:
    """On one GPU a copy gains nothing; across two, reading in place costs every step."""
    access = choose_access("auto", ours=ours, theirs=theirs)
    assert access.way == way
    assert access.because


@pytest.mark.parametrize("configured", ["pull", "direct"])
def test_what_is_configured_is_done(configured: str) -> None:
    access = choose_access(configured, ours="cpu", theirs="cpu")  # type: ignore[arg-type]
    assert (access.way, access.because) == (configured, "pool.access says so")
