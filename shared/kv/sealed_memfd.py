"""Anonymous shared memory that one process writes and any other can only read.

The maker maps the memory writable first and then seals it.  From then on the kernel itself refuses
to shrink or grow it (a reader of a shrunk file dies of SIGBUS), to map it writable once more, or
to change the seals.  So its descriptor is a right to read and nothing else.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from shared.kv.errors import MappingFault, PoolAllocationError, PoolMappingError
from shared.kv.memory import require_available

F_SEAL_FUTURE_WRITE = 0x0010
"""Forbids new writable mappings, keeps those that exist; Linux 5.1, not yet in `fcntl`."""

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
"""What a maker sets and a reader insists on."""


def create_sealed(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    """Allocate, map writable, then seal.

    Every page is allocated and mapped here.  It costs 0.2 to 1 s a gigabyte, once; in return
    a machine without room says so now instead of killing the process in mid-request, and no
    prompt pays for page faults, which take longer than the copy they interrupt.

    Args:
        name: What /proc/PID/maps shows; no identity, any number of files may share it.
        num_bytes: Size; above zero.

    Returns:
        The descriptor, to be passed on and closed by the caller, and the writable mapping.

    Raises:
        PoolAllocationError: There is no room, or the kernel lacks memfd or its seals.
    """
    require_available(num_bytes)
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise PoolAllocationError(num_bytes=num_bytes, reason=f"memfd_create: {error}") from error
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        mapping = mmap.mmap(
            fd,
            num_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise PoolAllocationError(
            num_bytes=num_bytes,
            reason=str(error),
            hint="a memfd pool needs that much memory and Linux 5.1 or later",
        ) from error
    return fd, mapping


def map_sealed(fd: int, num_bytes: int, *, what: str) -> mmap.mmap:
    """Map a peer's sealed memfd for reading, after checking that it is one.

    Args:
        fd: The descriptor.  It stays the caller's, who may close it at once.
        num_bytes: The size that it must have.
        what: How errors call it, such as "the pool".

    Raises:
        PoolMappingError: It is no memfd, lacks a seal, has another size, or cannot be mapped.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found_bytes = os.fstat(fd).st_size
    except (OSError, ValueError) as error:
        # A negative number is a ValueError, a closed or foreign descriptor an OSError.
        raise PoolMappingError(
            fault=MappingFault.DESCRIPTOR, message=f"{what} is not a memfd: {error}"
        ) from error
    if seals & SEALS != SEALS:
        raise PoolMappingError(
            fault=MappingFault.SEALS,
            message=f"{what} has the seals {seals:#x}, and must have {SEALS:#x}",
        )
    if found_bytes != num_bytes:
        raise PoolMappingError(
            fault=MappingFault.SIZE,
            message=f"{what} has {found_bytes} bytes, and must have {num_bytes}",
        )
    try:
        return mmap.mmap(
            fd, num_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
        )
    except (OSError, ValueError) as error:
        raise PoolMappingError(
            fault=MappingFault.MAP, message=f"{what} cannot be mapped: {error}"
        ) from error
