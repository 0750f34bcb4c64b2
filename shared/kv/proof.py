"""The functional proof at hand-shake: what one daemon writes, the other reads through its mapping.

A handle that opens is no proof: it may name another pool of the same size, an older one, or a path
between two GPUs that drops bytes in silence.  So prefilld writes a random pattern into the reserved
block, decoded answers with its digest as read through the mapping, and how fast it reads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from shared.kv.errors import MappingFault, PoolMappingError
from shared.kv.layout import RESERVED_BLOCK
from shared.kv.pool import KVPool

PATTERN_BYTES = 4096
"""What a hand-shake writes, or a whole block where that is less: enough to be unguessable."""

NUM_READINGS = 3
"""The best one counts: a machine that is busy for a moment must not fail a healthy mapping."""

READING_BYTES = 8 << 20
"""Bytes of one reading: large against fixed costs, and three take under 20 ms at 2 GB/s."""

GPU_READING_BYTES = 256 << 20
"""The same on a GPU: 0.7 ms over NVLink, against some 10 us that a launch costs.  Over a path that
is not even PCIe, at 0.5 GB/s, three take 1.5 s, and the hand-shake has thirty."""

GPU_TICK_MS = 0.5e-3
"""Resolution of a GPU's events."""


def pattern_bytes(pool: KVPool) -> int:
    """Return how many random bytes a hand-shake over this pool writes."""
    return min(PATTERN_BYTES, pool.layout.block_bytes)


def write_pattern(pool: KVPool, pattern: bytes) -> bytes:
    """Write random bytes to the head of the reserved block, and return their SHA-256.

    They are there when this returns, on a GPU too.

    Args:
        pool: A pool that this process may write.
        pattern: Fresh random bytes, at most a block of them.  An old pattern proves nothing.

    Raises:
        ValueError: The pattern is empty or longer than a block.
    """
    if not 0 < len(pattern) <= pool.layout.block_bytes:
        raise ValueError(
            f"a pattern of {len(pattern)} bytes does not fit 1 to {pool.layout.block_bytes}"
        )
    _reserved_bytes(pool)[: len(pattern)].copy_(
        torch.frombuffer(bytearray(pattern), dtype=torch.uint8)
    )
    if pool.kv.is_cuda:
        torch.cuda.synchronize(pool.kv.device)
    return hashlib.sha256(pattern).digest()


def read_digest(pool: KVPool, num_bytes: int) -> bytes:
    """Return the SHA-256 of the head of the reserved block, as seen through `pool`.

    Raises:
        PoolMappingError: `num_bytes`, which the peer announced, is not 1 to a block's bytes.
    """
    if not 0 < num_bytes <= pool.layout.block_bytes:
        raise PoolMappingError(
            fault=MappingFault.SIZE,
            message=f"a proof of {num_bytes} bytes does not fit a block of "
            f"{pool.layout.block_bytes}",
        )
    # On a GPU `| 0` reads by a kernel, as a pull does: a copy engine's path may be whole where the
    # kernels' is not.
    seen = _reserved_bytes(pool)[:num_bytes] | 0
    return hashlib.sha256(seen.cpu().numpy().tobytes()).digest()


def measure_bandwidth(pool: KVPool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Read through a mapping into private memory, and return the best rate in 10^9 bytes a second.

    Args:
        pool: The mapping.
        clock: Seconds, monotonic; a GPU has its own.

    On a CPU that takes a few milliseconds, and a pool smaller than the processor's caches shows
    those.  A GPU reads the pool by a kernel, `GPU_READING_BYTES` at a time where there are as many,
    and the time is the GPU's own, launches not counted.
    """
    memory = pool.kv.reshape(-1).view(torch.uint8)
    if memory.is_cuda:
        return _gpu_bandwidth(memory)
    length = min(len(memory), READING_BYTES)
    buffer = np.empty(length, dtype=np.uint8)
    shortest_s = float("inf")
    for window in _windows(memory, length):
        began_s = clock()
        np.copyto(buffer, window.numpy())  # one thread: see `copy_blocks`
        shortest_s = min(shortest_s, clock() - began_s)
    # A clock too coarse to see the reading bounds it from below by its own tick.
    shortest_s = max(shortest_s, time.get_clock_info("perf_counter").resolution)
    return length / shortest_s / 1e9


def _gpu_bandwidth(memory: Tensor) -> float:
    """Return the best rate of a kernel that reads memory, in 10^9 bytes a second.

    Args:
        memory: [num_bytes] uint8 on a GPU, perhaps another's seen through a mapping.

    Little memory is read as often as makes up a reading: of a kernel of some microseconds most is
    its start, and a whole path would seem slow.
    """
    item_bytes = torch.int64.itemsize
    length = min(len(memory), GPU_READING_BYTES) // item_bytes * item_bytes
    num_times = GPU_READING_BYTES // length
    with torch.cuda.device(memory.device):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        shortest_ms = float("inf")
        # One more, which loads the kernel and lets the driver set up the path.
        for window in (memory[:length], *_windows(memory, length)):
            began.record()
            window.view(torch.int64).expand(num_times, -1).sum()
            ended.record()
            ended.synchronize()
            shortest_ms = min(shortest_ms, began.elapsed_time(ended))
    return num_times * length / max(shortest_ms, GPU_TICK_MS) / 1e6


def _windows(memory: Tensor, length: int) -> Iterator[Tensor]:
    """Yield as many pieces of memory as there are readings, one behind the other where they fit."""
    for reading in range(NUM_READINGS):
        start = min(reading * length, len(memory) - length)
        start -= start % torch.int64.itemsize
        yield memory[start : start + length]


def _reserved_bytes(pool: KVPool) -> Tensor:
    """Return the reserved block as a view of [block_bytes] uint8."""
    return pool.kv[RESERVED_BLOCK].reshape(-1).view(torch.uint8)
