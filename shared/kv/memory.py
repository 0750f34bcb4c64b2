"""How much memory this process could still get, so that a pool too large fails at the start.

Linux promises memory that it does not have: a pool larger than the machine is created without
complaint, and filling it ends with the kernel killing somebody.
"""

from __future__ import annotations

from pathlib import Path

from shared.kv.errors import PoolAllocationError
from shared.kv.layout import MAX_BLOCKS, POOL_ALIGNMENT_BYTES, RESERVED_BLOCK

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def require_available(num_bytes: int) -> None:
    """Refuse an allocation that this machine or this process's limits cannot hold.

    Raises:
        PoolAllocationError: Fewer bytes are available.
    """
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise PoolAllocationError(
            num_bytes=num_bytes,
            reason=f"{available} bytes of memory are available",
            hint="ask for fewer blocks",
        )


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that could be allocated now, or None where the kernel does not tell.

    The least of what the machine has available and of the limits of this process's control
    groups (version 2), which is what `MemoryMax=` and a container's memory limit set.  Swap is
    not counted: a KV pool that is swapped out serves nobody.
    """
    bounds = [_machine_bytes(proc), *_group_bounds(proc, cgroup)]
    return min((bound for bound in bounds if bound is not None), default=None)


def _machine_bytes(proc: Path) -> int | None:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
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
        PoolAllocationError: That is less than one block beside the reserved one.
    """
    num_bytes = int(free_bytes * fraction) // POOL_ALIGNMENT_BYTES * POOL_ALIGNMENT_BYTES
    num_blocks = min(num_bytes // block_bytes, MAX_BLOCKS)
    if num_blocks < RESERVED_BLOCK + 2:
        raise PoolAllocationError(
            num_bytes=2 * block_bytes,
            reason=f"{fraction:g} of the {free_bytes} bytes that are free of the GPU's "
            f"{total_bytes} is too little",
            hint="raise memory_fraction, or see by nvidia-smi who holds the rest",
        )
    return num_blocks
