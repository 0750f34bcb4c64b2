"""Tests of shared/kv/proof.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from itertools import count

import pytest
import torch

from shared.kv.errors import PoolMappingError
from shared.kv.layout import KVLayout
from shared.kv.memfd import MemfdMapping, MemfdPool
from shared.kv.pool import LocalPool
from shared.kv.proof import (
    NUM_READINGS,
    PATTERN_BYTES,
    _windows,
    measure_bandwidth,
    pattern_bytes,
    read_digest,
    write_pattern,
)


@pytest.fixture
def pool(layout: KVLayout) -> Iterator[MemfdPool]:
    pool = MemfdPool.create(layout, fill=float("nan"))
    yield pool
    pool.close()


@pytest.fixture
def mapping(pool: MemfdPool, layout: KVLayout) -> Iterator[MemfdMapping]:
    fd = pool.export()
    mapping = MemfdMapping.open(fd, layout, layout.pool_bytes)
    os.close(fd)
    yield mapping
    mapping.close()


def test_a_mapping_of_the_pool_passes(pool: MemfdPool, mapping: MemfdMapping) -> None:
    """The digest as read is the digest of what was written."""
    pattern = os.urandom(pattern_bytes(pool))
    digest = write_pattern(pool, pattern)
    assert digest == hashlib.sha256(pattern).digest()
    assert read_digest(mapping, len(pattern)) == digest


def test_another_pool_of_the_same_size_fails(pool: MemfdPool, layout: KVLayout) -> None:
    """A handle that opens may open the wrong memory."""
    other = LocalPool(layout)
    digest = write_pattern(pool, os.urandom(32))
    assert read_digest(other, 32) != digest
    other.close()


def test_the_proof_touches_the_reserved_block_only(pool: MemfdPool, layout: KVLayout) -> None:
    """It may run while requests hold every other block."""
    write_pattern(pool, os.urandom(layout.block_bytes))
    assert pool.kv[1:].isnan().all()


def test_a_pattern_fits_a_block(layout: KVLayout) -> None:
    """A tiny block takes a shorter pattern, a large one no more than is needed."""
    tiny, large = LocalPool(layout), LocalPool(layout.with_num_blocks(4))
    assert pattern_bytes(tiny) == layout.block_bytes == 768
    large.close()
    tiny.close()
    wide = KVLayout(
        num_blocks=2, num_layers=8, num_kv_heads=4, block_size=16, head_dim=64, dtype="float32"
    )
    large = LocalPool(wide)
    assert pattern_bytes(large) == PATTERN_BYTES
    large.close()


@pytest.mark.parametrize("num_bytes", [0, 769])
def test_a_pattern_that_does_not_fit_is_refused(pool: MemfdPool, num_bytes: int) -> None:
    """It would run into a request's block, or prove nothing."""
    with pytest.raises(ValueError, match=f"a pattern of {num_bytes} bytes does not fit 1 to 768"):
        write_pattern(pool, bytes(num_bytes))


@pytest.mark.parametrize("num_bytes", [-1, 0, 769, 1 << 31])
def test_a_proof_of_an_impossible_length_is_the_peers_fault(
    mapping: MemfdMapping, num_bytes: int
) -> None:
    """The length came off the wire."""
    with pytest.raises(PoolMappingError, match=f"a proof of {num_bytes} bytes does not fit"):
        read_digest(mapping, num_bytes)


def test_the_best_reading_is_the_one_that_counts(mapping: MemfdMapping, layout: KVLayout) -> None:
    """A machine that is busy for a moment must not fail a healthy mapping."""
    durations_s = [5.0, 0.5, 2.0]
    assert len(durations_s) == NUM_READINGS
    ticks = iter([0.0, 5.0, 10.0, 10.5, 20.0, 22.0])
    rate = measure_bandwidth(mapping, clock=lambda: next(ticks))
    assert rate == pytest.approx(layout.kv_bytes / 0.5 / 1e9)


def test_readings_are_of_other_bytes_where_there_are_as_many() -> None:
    """The second reading of the same bytes would be one of the processor's caches."""
    memory = torch.arange(64, dtype=torch.uint8)
    assert [int(window[0]) for window in _windows(memory, 16)] == [0, 16, 32]
    assert [int(window[0]) for window in _windows(memory, 30)] == [0, 24, 32]
    assert [(int(window[0]), len(window)) for window in _windows(memory, 64)] == [(0, 64)] * 3


def test_a_clock_that_stands_still_gives_a_finite_rate(mapping: MemfdMapping) -> None:
    """The rate travels in a message that takes no infinity."""
    still = count(0, 0)
    assert 0 < measure_bandwidth(mapping, clock=lambda: float(next(still))) < 1e6


def test_a_real_reading_is_positive(mapping: MemfdMapping) -> None:
    """Whatever the machine, some bytes arrive."""
    assert measure_bandwidth(mapping) > 0
