"""The kinds of path on which decoded reads prefilld's pool, and how slow a healthy one may be.

The floors tell one kind from another: a path that silently goes through host memory or is emulated
is ten times slower than the slowest of its kind, and no busy moment makes a healthy one so.
"""

from __future__ import annotations

import enum


class PathKind(enum.Enum):
    """Where the pool lies, seen from its reader."""

    SHARED_MEMORY = "shared-memory"
    """A memfd: there is only one path to it."""
    ONE_GPU = "one-gpu"
    """The reader's own GPU."""
    NVLINK = "nvlink"
    """Another GPU, linked to the reader's by NVLink."""
    PCIE = "pcie"
    """Another GPU, by PCIe or by a path that nobody can tell."""


FLOORS_GB_S: dict[PathKind, float] = {
    PathKind.SHARED_MEMORY: 0.0,
    PathKind.ONE_GPU: 40.0,
    PathKind.NVLINK: 40.0,
    PathKind.PCIE: 5.0,
}
"""In 10^9 bytes a second.  NVLink has been measured at 366, PCIe 4.0 gives 20, a detour through
host memory under 1."""


def path_kind(*, ours: str, theirs: str, is_nvlink: bool | None) -> PathKind:
    """Return the kind of path between two devices.

    Args:
        ours: The reader's device, `cpu` or a UUID.
        theirs: The pool's.
        is_nvlink: Whether the two are linked by NVLink; None where nobody tells.
    """
    if "cpu" in (ours, theirs):
        return PathKind.SHARED_MEMORY
    if ours == theirs:
        return PathKind.ONE_GPU
    return PathKind.NVLINK if is_nvlink else PathKind.PCIE
