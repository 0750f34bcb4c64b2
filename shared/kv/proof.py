"""The functional proof at hand-shake: what one daemon writes, the other reads through its mapping.

A handle that opens is no proof: it may name another pool of the same size, an older one, or a path
between two GPUs that drops bytes in silence.  So prefilld writes a random pattern into the reserved
block, decoded answers with its digest as read through the mapping, and how fast it reads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

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


def pattern_bytes(pool: KVPool) -> int:
    """Return how many random bytes a hand-shake over this pool writes."""
    return min(PATTERN_BYTES, pool.layout.block_bytes)


def write_pattern(pool: KVPool, pattern: bytes) -> bytes:
    """Write random bytes to the head of the reserved block, and return their SHA-256.

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
    return hashlib.sha256(_reserved_bytes(pool)[:num_bytes].numpy().tobytes()).digest()


def measure_bandwidth(pool: KVPool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Read through a mapping into private memory, and return the best rate in 10^9 bytes a second.

    Args:
        pool: The mapping.
        clock: Seconds, monotonic.

    Takes a few milliseconds and reads at most `NUM_READINGS * READING_BYTES`, from the pool's
    head.  A pool smaller than the processor's caches shows those.
    """
    memory = pool.kv.reshape(-1).view(torch.uint8).numpy()
    length = min(len(memory), READING_BYTES)
    buffer = np.empty(length, dtype=np.uint8)
    shortest_s = float("inf")
    for reading in range(NUM_READINGS):
        start = min(reading * length, len(memory) - length)
        began_s = clock()
        np.copyto(buffer, memory[start : start + length])  # one thread: see `copy_blocks`
        shortest_s = min(shortest_s, clock() - began_s)
    # A clock too coarse to see the reading bounds it from below by its own tick.
    shortest_s = max(shortest_s, time.get_clock_info("perf_counter").resolution)
    return length / shortest_s / 1e9


def _reserved_bytes(pool: KVPool) -> Tensor:
    """Return the reserved block as a view of [block_bytes] uint8."""
    return pool.kv[RESERVED_BLOCK].reshape(-1).view(torch.uint8)
