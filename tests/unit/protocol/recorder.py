"""What a message socket told its owner, and ways to wait for more of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

from protocol import messages as m
from protocol.closing import CloseReason
from protocol.connection import Connection
from protocol.descriptors import close_all
from protocol.sockets import MessageSocket
from protocol.states import Role
from tests.unit.protocol.samples import SAMPLES


def fill(sock: socket.socket) -> int:
    """Write zeros to a non-blocking socket until the kernel takes no more; return how many."""
    total = 0
    while True:
        try:
            total += sock.send(bytes(4096))
        except BlockingIOError:
            return total


class Recorder:
    """Owns a MessageSocket and keeps everything it says, in order."""

    def __init__(
        self, sock: socket.socket, role: Role, connection: Connection | None = None, **options: int
    ) -> None:
        self.raw = sock
        self.socket = MessageSocket(
            sock, connection or Connection(role), loop=asyncio.get_running_loop(), **options
        )
        self.messages: list[m.Message] = []
        self.fds: list[list[int] | None] = []
        self.closed: list[CloseReason] = []
        self.num_flushed = 0
        self.react: Callable[[m.Message], None] | None = None
        self._changed = asyncio.Event()

    def start(self) -> Recorder:
        self.socket.start(self._on_message, self._on_closed, self._on_flushed)
        return self

    def _on_message(self, message: m.Message, fds: list[int] | None) -> None:
        self.messages.append(message)
        self.fds.append(fds)
        self._changed.set()
        if self.react is not None:
            self.react(message)

    def _on_closed(self, reason: CloseReason) -> None:
        self.closed.append(reason)
        self._changed.set()

    def _on_flushed(self) -> None:
        self.num_flushed += 1
        self._changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something was told that makes the condition true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def until_received(self, kind: type[m.Message]) -> m.Message:
        """Wait for a message of this type; return the first."""
        await self.until(lambda: kind in map(type, self.messages))
        return next(message for message in self.messages if type(message) is kind)


def socketpair(send_buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking stream sockets."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in (one, other):
        sock.setblocking(False)
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    return one, other


async def open_link(
    send_buffer_bytes: int | None = None, **options: int
) -> tuple[Recorder, Recorder]:
    """Return both ends of a link in its open phase: prefilld's, decoded's."""
    one, other = socketpair(send_buffer_bytes)
    prefilld = Recorder(one, Role.PREFILLD_LINK, **options).start()
    decoded = Recorder(other, Role.DECODED_CLIENT, **options).start()  # until HELLO tells more
    prefilld.socket.send(SAMPLES[m.Hello])
    await decoded.until_received(m.Hello)
    decoded.socket.send(SAMPLES[m.Welcome])
    await prefilld.until_received(m.Welcome)
    pool_and_page = os.pipe()
    prefilld.socket.send(SAMPLES[m.Map], pool_and_page)
    close_all(pool_and_page)
    await decoded.until_received(m.Map)
    close_all(decoded.fds[-1] or [])
    decoded.socket.send(SAMPLES[m.Mapped])
    await prefilld.until_received(m.Mapped)
    for end in (prefilld, decoded):
        end.messages.clear()
        end.fds.clear()
    return prefilld, decoded
