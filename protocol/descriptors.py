"""Descriptors that ride on frames: which frame each belongs to, and who closes the others.

The kernel ends a read behind the first bytes that carry descriptors, and a sender puts them on the
first byte of their frame and writes that frame alone.  So descriptors belong to the frame that
holds the last byte of the read that brought them.  Ownership:

    read from the socket  -> DescriptorQueue  -> the receiver of the message
                                              -> closed: surplus, unexpected, incomplete
"""

from __future__ import annotations

import os
import socket
import stat
from array import array
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# The kernel passes at most SCM_MAX_FD = 253 descriptors at once, see unix(7).  With room for all
# of them, MSG_CTRUNC can only mean that this process may not open more.
ANCILLARY_BYTES = socket.CMSG_SPACE(253 * array("i").itemsize)

Ancillary = tuple[int, int, bytes]


def rights(fds: Sequence[int]) -> list[tuple[int, int, array[int]]]:
    """Return what `sendmsg` takes to pass these descriptors; the kernel duplicates them."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


def received_rights(ancillary: Iterable[Ancillary]) -> list[int]:
    """Return the descriptors that one `recvmsg` brought.  They are open, and the caller's."""
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors that nobody wants."""
    for fd in fds:
        os.close(fd)


class _Batch(NamedTuple):
    """What one read brought: its descriptors, and the stream position of its last byte."""

    fds: list[int]
    is_cut: bool
    last_byte: int


class DescriptorQueue:
    """Descriptors that have arrived and wait for their frame to be whole.  Owns them."""

    def __init__(self) -> None:
        self._batches: deque[_Batch] = deque()

    def add(self, fds: list[int], *, is_cut: bool, last_byte: int) -> None:
        """Take what one read brought.

        Args:
            fds: The descriptors, now this queue's.
            is_cut: The kernel said MSG_CTRUNC: there were more, and they are gone.
            last_byte: Position in the stream of the last byte of that read.
        """
        if fds or is_cut:
            self._batches.append(_Batch(fds, is_cut, last_byte))

    def take(self, *, frame_end: int, num_wanted: int) -> list[int] | None:
        """Return the descriptors of the frame that ends before `frame_end`, now the caller's.

        Returns:
            `num_wanted` descriptors, or None where any of them is missing.
        """
        fds: list[int] = []
        is_cut = False
        while self._batches and self._batches[0].last_byte < frame_end:
            batch = self._batches.popleft()
            fds += batch.fds
            is_cut = is_cut or batch.is_cut
        if num_wanted and (is_cut or len(fds) < num_wanted):
            close_all(fds)
            return None
        close_all(fds[num_wanted:])
        return fds[:num_wanted]

    def close(self) -> None:
        """Close what no frame has claimed."""
        while self._batches:
            close_all(self._batches.popleft().fds)


def connection_among(fds: list[int] | None) -> int | None:
    """Return the connection that a message brought; None where it was lost, or is no socket.

    A descriptor that is no socket is closed: nobody could talk to a client over it.
    """
    if not fds:
        return None
    if stat.S_ISSOCK(os.fstat(fds[0]).st_mode):
        return fds[0]
    os.close(fds[0])
    return None
