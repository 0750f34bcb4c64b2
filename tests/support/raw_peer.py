"""A peer that may say anything: frames, half frames and nonsense, over one real socket.

It checks what it receives and nothing that it sends, which is the point: daemons must survive it.
"""

from __future__ import annotations

import os
import socket
import time
from array import array
from typing import TYPE_CHECKING, Any, Self, TypeVar

from protocol.codec import decode_message, encode_message
from protocol.descriptors import ANCILLARY_BYTES, received_rights
from protocol.frames import FrameDecoder, encode_frame
from protocol.messages import MESSAGE_TYPES, CreditUpdate, Message, Ping, Pong

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

DEADLINE_S = 10.0
"""Far beyond what any answer takes; a daemon that is silent fails the test and does not hang it."""

MAX_BODY_BYTES = 1 << 24

M = TypeVar("M", bound=Message)


class ClosedByPeerError(Exception):
    """The other side has closed, and everything that it had sent was read."""


class RawPeer:
    """One end of a connection.

    Args:
        sock: A connected stream socket, owned from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(DEADLINE_S)
        self.socket = sock
        self._decoder = FrameDecoder(MAX_BODY_BYTES)
        self._fds: list[int] = []

    @classmethod
    def connect(cls, path: Path) -> Self:
        """Connect to a daemon's socket."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(str(path))
        except OSError:
            sock.close()
            raise
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and every descriptor that came and was not taken."""
        self.socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    # --- out -------------------------------------------------------------------------------

    def send(self, *messages: Message | dict[str, Any] | bytes, fds: Sequence[int] = ()) -> None:
        """Write messages, maps or bytes as they are, in one go, descriptors on the first byte."""
        data = b"".join(_frame(message) for message in messages)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        num_sent = self.socket.sendmsg([data], ancillary)
        if num_sent < len(data):  # a peer that read enough may have hung up already
            self.socket.sendall(data[num_sent:])

    def finish_sending(self) -> None:
        """Close the sending half: the peer reads the end of the stream."""
        self.socket.shutdown(socket.SHUT_WR)

    # --- in --------------------------------------------------------------------------------

    def receive(self) -> Message:
        """Return the next message.

        Raises:
            ClosedByPeerError: There is none.
        """
        while (body := self._decoder.next_body()) is None:
            try:
                data, ancillary, _, _ = self.socket.recvmsg(
                    65_536, ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionResetError:
                data, ancillary = b"", []
            self._fds += received_rights(ancillary)
            if not data:
                raise ClosedByPeerError
            self._decoder.receive_data(data)
        return decode_message(body, MESSAGE_TYPES[body["type"]])

    def take_fds(self) -> list[int]:
        """Return the descriptors that came so far, now the caller's to close."""
        fds, self._fds = self._fds, []
        return fds

    def expect(self, kind: type[M]) -> M:
        """Return the next message, which is a `kind`.

        PINGs before it are answered, PONGs and CREDITs passed over: they come when they will.
        """
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, Ping | Pong | CreditUpdate), message
            if isinstance(message, Ping):
                self.send(Pong(sent_ns=message.sent_ns))

    def rest(self) -> list[Message]:
        """Return all messages up to the end of the stream; it must come before the deadline."""
        messages: list[Message] = []
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            try:
                messages.append(self.receive())
            except ClosedByPeerError:
                return messages
        raise AssertionError(f"the stream goes on: {messages[-3:]}")


def _frame(message: Message | dict[str, Any] | bytes) -> bytes:
    if isinstance(message, bytes):
        return message
    if isinstance(message, Message):
        return encode_message(message)
    return encode_frame(message)
