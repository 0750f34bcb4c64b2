"""How decoded uses the blocks of a link's pool: copied into its own, or read where they are.  Pure.

Reading in place costs every step the way to the blocks, copying costs it once.  On one GPU that way
is the GPU's own memory, so nothing is gained by a copy; across two it is several times slower.  In
shared memory the way costs nothing either, but copied blocks outlive prefilld, and copying them is
a small part of computing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Way = Literal["pull", "direct"]


@dataclass(frozen=True, slots=True)
class Access:
    """What was chosen, and why, as `kvpair status` tells it."""

    way: Way
    because: str


def choose_access(
    configured: Literal["auto", "pull", "direct"], *, ours: str, theirs: str
) -> Access:
    """Choose for one link.

    Args:
        configured: `pool.access`.
        ours: Where decoded computes: a GPU's UUID, or `cpu`.
        theirs: Where prefilld does.
    """
    if configured != "auto":
        return Access(configured, "pool.access says so")
    if ours == "cpu":
        return Access("pull", "copied blocks outlive prefilld")
    if ours == theirs:
        return Access("direct", "both daemons are on one GPU")
    return Access("pull", "the daemons are on two GPUs")
