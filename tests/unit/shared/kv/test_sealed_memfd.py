"""Tests of shared/kv/sealed_memfd.py."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared.kv.errors import MappingFault, PoolAllocationError, PoolMappingError
from shared.kv.sealed_memfd import SEALS, create_sealed, map_sealed
from tests.support.descriptors import num_descriptors

NUM_BYTES = 3 * mmap.PAGESIZE


@contextmanager
def sealed(num_bytes: int = NUM_BYTES) -> Iterator[tuple[int, mmap.mmap]]:
    """Make one and clean it up."""
    fd, mapping = create_sealed("test", num_bytes)
    try:
        yield fd, mapping
    finally:
        mapping.close()
        os.close(fd)


@contextmanager
def memfd(num_bytes: int, seals: int) -> Iterator[int]:
    """Make one whose maker set only some seals."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def test_a_reader_sees_what_the_maker_writes_later() -> None:
    """The seals spare the mapping that was there before them."""
    with sealed() as (fd, mapping):
        reader = map_sealed(fd, NUM_BYTES, what="the memory")
        mapping[5:8] = b"abc"
        assert reader[5:8] == b"abc"
        assert len(reader) == NUM_BYTES
        reader.close()


def test_every_page_is_there_from_the_start() -> None:
    """A machine without room must say so now and not kill the process in mid-request."""
    with sealed() as (fd, _):
        assert os.fstat(fd).st_blocks * 512 >= NUM_BYTES


def test_the_descriptor_does_not_leak_into_children() -> None:
    """It is the right to read every prompt."""
    with sealed() as (fd, _):
        assert not os.get_inheritable(fd)


def test_the_kernel_refuses_every_way_to_write() -> None:
    """The descriptor that travels gives no more than the right to read."""
    with sealed() as (fd, mapping):
        with pytest.raises(PermissionError, match="Operation not permitted"):
            mmap.mmap(fd, NUM_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError, match="Operation not permitted"):
            os.pwrite(fd, b"x", 0)
        with pytest.raises(PermissionError, match="Operation not permitted"):
            os.ftruncate(fd, 0)
        with pytest.raises(PermissionError, match="Operation not permitted"):
            os.ftruncate(fd, 2 * NUM_BYTES)
        with pytest.raises(PermissionError, match="Operation not permitted"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert mapping[:] == bytes(NUM_BYTES)


def test_a_read_only_mapping_cannot_be_made_writable() -> None:
    """`mprotect` is the last way in, and the seal closes it too."""
    with sealed() as (fd, _):
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        size, number, pointer = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
        libc.mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        libc.mprotect.argtypes = [pointer, size, number]
        libc.munmap.argtypes = [pointer, size]
        address = libc.mmap(None, NUM_BYTES, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert libc.mprotect(address, NUM_BYTES, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
        assert libc.munmap(address, NUM_BYTES) == 0


@pytest.mark.parametrize("missing", [1 << bit for bit in range(5) if SEALS & 1 << bit])
def test_each_seal_is_insisted_on(missing: int) -> None:
    """A maker that can still shrink the memory can kill its reader."""
    with memfd(NUM_BYTES, SEALS & ~missing) as fd:
        with pytest.raises(PoolMappingError, match="the pool has the seals") as caught:
            map_sealed(fd, NUM_BYTES, what="the pool")
        assert caught.value.fault is MappingFault.SEALS


@pytest.mark.parametrize("wrong_bytes", [NUM_BYTES - 1, NUM_BYTES + 1, 0, 1 << 60])
def test_a_size_that_is_not_the_announced_one_is_refused(wrong_bytes: int) -> None:
    """Reading past the end of a mapping is a SIGBUS, or somebody else's memory."""
    with sealed() as (fd, _):
        message = f"the pool has {NUM_BYTES} bytes, and must have {wrong_bytes}"
        with pytest.raises(PoolMappingError, match=message) as caught:
            map_sealed(fd, wrong_bytes, what="the pool")
        assert caught.value.fault is MappingFault.SIZE


def test_a_plain_file_is_no_pool(tmp_path: Path) -> None:
    """A file can be truncated under its reader, and lies on a disk."""
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(NUM_BYTES)
        # Some file systems know seals, and then a file has none that count.
        with pytest.raises(PoolMappingError, match=r"is not a memfd|has the seals"):
            map_sealed(file.fileno(), NUM_BYTES, what="the pool")


def test_a_socket_is_no_pool() -> None:
    """A peer may send any descriptor it has."""
    left, right = socket.socketpair()
    with left, right, pytest.raises(PoolMappingError, match="the pool is not a memfd") as caught:
        map_sealed(left.fileno(), NUM_BYTES, what="the pool")
    assert caught.value.fault is MappingFault.DESCRIPTOR


@pytest.mark.parametrize("fd", [-1, 1 << 20])
def test_a_descriptor_that_is_not_open_is_no_pool(fd: int) -> None:
    """It may have been lost on the way."""
    with pytest.raises(PoolMappingError, match="the pool is not a memfd") as caught:
        map_sealed(fd, NUM_BYTES, what="the pool")
    assert caught.value.fault is MappingFault.DESCRIPTOR


def test_an_empty_memfd_cannot_be_mapped() -> None:
    """An announced size of 0 that is true is still refused by name."""
    with memfd(0, SEALS) as fd:
        with pytest.raises(PoolMappingError, match="the pool cannot be mapped") as caught:
            map_sealed(fd, 0, what="the pool")
        assert caught.value.fault is MappingFault.MAP


def test_what_the_machine_does_not_have_is_refused_at_once() -> None:
    """No descriptor stays open behind the error."""
    before = num_descriptors()
    with pytest.raises(PoolAllocationError, match="bytes of memory are available"):
        create_sealed("test", 1 << 50)
    assert num_descriptors() == before


def test_a_refusal_of_the_kernel_is_named_and_closes_the_descriptor() -> None:
    """An empty file cannot be allocated."""
    before = num_descriptors()
    with pytest.raises(PoolAllocationError, match=r"a pool of 0 bytes: .*Invalid"):
        create_sealed("test", 0)
    assert num_descriptors() == before


CHILD = """
import os, sys
from shared.kv.sealed_memfd import map_sealed
fd, num_bytes = int(sys.argv[1]), int(sys.argv[2])
mapping = map_sealed(fd, num_bytes, what="the memory")
os.close(fd)
print(mapping[:5].decode(), flush=True)
sys.stdin.readline()
print(mapping[:5].decode())
"""


def test_another_process_sees_writes_and_outlives_the_maker() -> None:
    """What decoded maps stays readable when prefilld has closed everything."""
    fd, mapping = create_sealed("test", NUM_BYTES)
    mapping[:5] = b"first"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(fd), str(NUM_BYTES)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "first\n"
        mapping[:5] = b"later"
        mapping.close()
        os.close(fd)
        rest, _ = child.communicate("\n", timeout=30)
    assert rest == "later\n"
    assert child.returncode == 0
