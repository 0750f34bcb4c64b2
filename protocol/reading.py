"""One read of a non-blocking socket: bytes and descriptors, nothing yet, or the stream's end."""

from __future__ import annotations

import socket
from typing import NamedTuple

from protocol.closing import CloseKind, CloseReason
from protocol.descriptors import ANCILLARY_BYTES, received_rights

# Large enough for every frame but a long prompt's, small enough that one busy peer does not hold
# up the others.
READ_BYTES = 65_536


class Received(NamedTuple):
    """What one read brought."""

    data: bytes
    fds: list[int]
    """Open and close-on-exec; the reader's to close."""
    is_cut: bool
    """The kernel had more descriptors and dropped them."""


def receive(sock: socket.socket, *, takes_descriptors: bool) -> Received | CloseReason | None:
    """Read once; None where nothing is there now, the reason where nothing will come any more.

    Args:
        sock: A non-blocking stream socket.
        takes_descriptors: Whether this peer may send any; without room for them the kernel drops
            them unopened.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            READ_BYTES, ANCILLARY_BYTES if takes_descriptors else 0, socket.MSG_CMSG_CLOEXEC
        )
    except (BlockingIOError, InterruptedError):
        return None
    except ConnectionResetError:
        return CloseReason(CloseKind.GONE)
    except OSError as error:
        return CloseReason(CloseKind.FAULT, error)
    if not data:
        return CloseReason(CloseKind.GONE)
    return Received(data, received_rights(ancillary), bool(flags & socket.MSG_CTRUNC))
