"""Tests of shared/kv/memfd.py; test_pool.py holds it to what every pool must do."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings

import pytest

from shared.kv.errors import MappingFault, PoolAllocationError, PoolClosedError, PoolMappingError
from shared.kv.layout import KVLayout
from shared.kv.memfd import MemfdMapping, MemfdPool


def test_a_mapping_shows_what_the_pool_holds(layout: KVLayout) -> None:
    """Nothing is copied: a block written after the mapping was made is seen as well."""
    pool = MemfdPool.create(layout)
    fd = pool.export()
    mapping = MemfdMapping.open(fd, layout, layout.pool_bytes)
    os.close(fd)
    pool.kv[7, 1, 1, 2, 3, 0] = 2.5
    assert mapping.kv[7, 1, 1, 2, 3, 0] == 2.5
    assert mapping.kv.sum() == 2.5
    mapping.close()
    pool.close()


def test_a_mapping_outlives_the_pool(layout: KVLayout) -> None:
    """A prefilld that dies does not take running streams with it."""
    pool = MemfdPool.create(layout, fill=3.0)
    fd = pool.export()
    mapping = MemfdMapping.open(fd, layout, layout.pool_bytes)
    os.close(fd)
    pool.close()
    assert (mapping.kv == 3.0).all()
    mapping.close()


def test_mapping_a_pool_warns_of_nothing(layout: KVLayout) -> None:
    """The warning of a read-only buffer is expected here, and no other is hidden."""
    pool = MemfdPool.create(layout)
    fd = pool.export()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        MemfdMapping.open(fd, layout, layout.pool_bytes).close()
        warnings.warn("another", UserWarning, stacklevel=1)
    os.close(fd)
    pool.close()
    assert [str(warning.message) for warning in caught] == ["another"]


def test_an_exported_descriptor_is_a_new_one_each_time(layout: KVLayout) -> None:
    """The caller closes it after sending; the pool's own stays."""
    pool = MemfdPool.create(layout)
    first, second = pool.export(), pool.export()
    assert first != second
    assert not os.get_inheritable(first)
    os.close(first)
    os.close(second)
    os.close(pool.export())
    pool.close()
    with pytest.raises(PoolClosedError, match="the pool is closed"):
        pool.export()


def test_an_announced_size_that_does_not_fit_the_layout_is_refused(layout: KVLayout) -> None:
    """The peer's number of blocks and its number of bytes must tell the same story."""
    pool = MemfdPool.create(layout)
    fd = pool.export()
    with pytest.raises(PoolMappingError, match="announced with 4194304 bytes; 8 blocks") as caught:
        MemfdMapping.open(fd, layout, layout.pool_bytes * 2)
    os.close(fd)
    pool.close()
    assert caught.value.fault is MappingFault.SIZE


def test_a_pool_smaller_than_its_owner_says_is_refused(layout: KVLayout) -> None:
    """Reading behind its end would be a SIGBUS."""
    pool = MemfdPool.create(layout)
    fd = pool.export()
    larger = layout.with_num_blocks(10_000)
    with pytest.raises(PoolMappingError, match="the pool has 2097152 bytes") as caught:
        MemfdMapping.open(fd, larger, larger.pool_bytes)
    os.close(fd)
    pool.close()
    assert caught.value.fault is MappingFault.SIZE


def test_a_pool_that_can_never_fit_is_refused(layout: KVLayout) -> None:
    """The daemon says so at its start."""
    with pytest.raises(PoolAllocationError, match="bytes of memory are available"):
        MemfdPool.create(layout.with_num_blocks(1 << 30))


CHILD = """
import os, resource, socket, sys
from shared.kv.layout import KVLayout
from shared.kv.memfd import MemfdMapping
from shared.kv.proof import read_digest
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
link = socket.socket(fileno=int(sys.argv[1]))
_, (fd,), _, _ = socket.recv_fds(link, 1, 1)
layout = KVLayout(num_blocks=8, num_layers=2, num_kv_heads=3, block_size=4, head_dim=4,
                  dtype="float32")
mapping = MemfdMapping.open(fd, layout, layout.pool_bytes)
os.close(fd)
print(mapping.kv[5].sum().item(), read_digest(mapping, 32).hex(), flush=True)
mapping.kv[5] = 0.0
print("written")
"""


def test_another_process_reads_the_pool_and_dies_if_it_writes(layout: KVLayout) -> None:
    """The kernel, not good manners, keeps decoded from writing prefilld's pool."""
    from shared.kv.proof import write_pattern

    pool = MemfdPool.create(layout)
    pool.kv[5] = 0.5
    digest = write_pattern(pool, os.urandom(32))
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdout=subprocess.PIPE,
        text=True,
    )
    with ours, theirs, child:
        fd = pool.export()
        socket.send_fds(ours, [b"m"], [fd])
        os.close(fd)
        output, _ = child.communicate(timeout=60)
    assert output == f"{0.5 * 192} {digest.hex()}\n"
    assert child.returncode == -signal.SIGSEGV
    assert (pool.kv[5] == 0.5).all()
    pool.close()
