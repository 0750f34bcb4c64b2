"""Tests of shared/kv/path_kind.py."""

from __future__ import annotations

import pytest

from shared.kv.path_kind import FLOORS_GB_S, PathKind, path_kind


@pytest.mark.parametrize(
    ("ours", "theirs", "is_nvlink", "kind"),
    [
        ("cpu", "cpu", None, PathKind.SHARED_MEMORY),
        ("GPU-a", "GPU-a", None, PathKind.ONE_GPU),
        ("GPU-a", "GPU-b", True, PathKind.NVLINK),
        ("GPU-a", "GPU-b", False, PathKind.PCIE),
        ("GPU-a", "GPU-b", None, PathKind.PCIE),
    ],
)
def test_the_kind_follows_the_devices(
    ours: str, theirs: str, is_nvlink: bool | None, kind: PathKind
) -> None:
    """A path that nobody can tell is held to the lower floor: no healthy one is refused."""
    assert path_kind(ours=ours, theirs=theirs, is_nvlink=is_nvlink) is kind


def test_every_kind_has_a_floor() -> None:
    assert set(FLOORS_GB_S) == set(PathKind)
