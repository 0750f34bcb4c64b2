"""How much memory this process could still get, so that a pool too large fails at the start.

Linux promises memory that it does not have: a pool larger than the machine is created without
complaint, and filling it ends with the kernel killing somebody.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from shared.kv.errors import PoolAllocationError, PoolShortageError
from shared.kv.layout import MAX_BLOCKS, POOL_ALIGNMENT_BYTES, RESERVED_BLOCK
from shared.kv.patience import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

PATIENCE_S = 3.0
"""For memory of a process that ends: decoded lets go of a dead prefilld's pool within 1 s, and the
kernel frees gigabytes in less.  Longer would only keep a user waiting who asked for too much."""

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def require_available(
    num_bytes: int,
    *,
    patience_s: float = PATIENCE_S,
    sleep: Callable[[float], None] = time.sleep,
    proc: Path = PROC,
    cgroup: Path = CGROUP,
) -> None:
    """Refuse an allocation that this machine or this process's limits cannot hold.

    Args:
        num_bytes: What is to be allocated.
        patience_s: How long to wait for what others hold, where there is enough in all.
        sleep: Waits for so many seconds.
        proc: The kernel's word for the machine.
        cgroup: And for groups of processes.

    Raises:
        PoolShortageError: Others hold too much of it.
        PoolAllocationError: The machine, or a limit, is too small.
    """
    bounds = [_machine_bytes(proc, "MemTotal"), *_group_bounds(proc, cgroup)]
    could_fit = all(bound is None or num_bytes <= bound for bound in bounds)

    def attempt() -> bool | None:
        available = available_bytes(proc, cgroup)
        return True if available is None or num_bytes <= available else None

    if not wait_for(attempt, patience_s=patience_s if could_fit else 0.0, sleep=sleep):
        raise (PoolShortageError if could_fit else PoolAllocationError)(
            num_bytes=num_bytes,
            reason=f"{available_bytes(proc, cgroup)} bytes of memory are available",
            hint="ask for fewer blocks" + (", or end what holds the rest" if could_fit else ""),
        )


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that could be allocated now, or None where the kernel does not tell.

    The least of what the machine has available and of the limits of this process's control
    groups (version 2), which is what `MemoryMax=` and a container's memory limit set.  Swap is
    not counted: a KV pool that is swapped out serves nobody.
    """
    bounds = [_machine_bytes(proc, "MemAvailable"), *_group_bounds(proc, cgroup)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _machine_bytes(proc: Path, wanted: str) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == wanted:
            return int(value.removesuffix("kB")) * 1024
    return None


def _group_bounds(proc: Path, cgroup: Path) -> list[int]:
    """Return the limit of each control group this process is in, from the inmost outwards."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    paths = [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    bounds = []
    for path in paths:
        group = Path(path)
        for ancestor in (group, *group.parents):
            try:
                text = (cgroup / ancestor / "memory.max").read_text().strip()
            except OSError:
                continue  # the root group has no limit and no such file
            if text.isdecimal():  # otherwise it is "max"
                bounds.append(int(text))
    return bounds


def blocks_from_memory(
    *, free_bytes: int, total_bytes: int, fraction: float, block_bytes: int
) -> int:
    """Return how many blocks a pool has that takes a share of a GPU's free memory.

    Args:
        free_bytes: What is free once the weights are there, less what computing needs.
        total_bytes: What the GPU has in all.
        fraction: The share.  Two daemons whose shares of one GPU add up to at most 1 both fit, in
            whatever order they look: what one has taken the other no longer counts as free.
        block_bytes: Bytes of a block.

    Raises:
        PoolShortageError: That is less than one block beside the reserved one, for others hold
            the memory.
        PoolAllocationError: It would be as little if nobody did.
    """

    def blocks_in(num_bytes: int) -> int:
        share = int(num_bytes * fraction) // POOL_ALIGNMENT_BYTES * POOL_ALIGNMENT_BYTES
        return min(share // block_bytes, MAX_BLOCKS)

    num_blocks = blocks_in(free_bytes)
    if num_blocks < RESERVED_BLOCK + 2:
        could_fit = blocks_in(total_bytes) >= RESERVED_BLOCK + 2
        raise (PoolShortageError if could_fit else PoolAllocationError)(
            num_bytes=2 * block_bytes,
            reason=f"{fraction:g} of the {free_bytes} bytes that are free of the GPU's "
            f"{total_bytes} is too little",
            hint="raise memory_fraction, or see by nvidia-smi who holds the rest",
        )
    return num_blocks
