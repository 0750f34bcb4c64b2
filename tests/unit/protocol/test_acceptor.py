"""Accepting connections: every one, without blocking, and without spinning when exhausted."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from pathlib import Path

from protocol.acceptor import BATCH, Acceptor
from protocol.listener import listen_unix
from protocol.unix import connect_unix
from tests.unit.protocol.conftest import Run


class Inbox:
    """Collects connections; `until` waits for the n-th."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.exhausted: list[OSError] = []
        self._changed = asyncio.Event()

    def take(self, sock: socket.socket) -> None:
        self.sockets.append(sock)
        self._changed.set()

    def note(self, error: OSError) -> None:
        self.exhausted.append(error)
        self._changed.set()

    async def until(self, num_sockets: int, num_exhausted: int = 0) -> None:
        while len(self.sockets) < num_sockets or len(self.exhausted) < num_exhausted:
            self._changed.clear()
            await self._changed.wait()

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def test_every_connection_is_handed_over(run: Run, tmp_path: Path) -> None:
    """More than one batch of them, each non-blocking."""

    async def scenario() -> None:
        inbox = Inbox()
        with listen_unix(tmp_path / "s") as listener:
            clients = [connect_unix(tmp_path / "s") for _ in range(2 * BATCH + 1)]
            acceptor = Acceptor(listener.socket, inbox.take, loop=asyncio.get_running_loop())
            await inbox.until(len(clients))
            assert {sock.gettimeout() for sock in inbox.sockets} == {0.0}
            acceptor.stop()
            acceptor.stop()
        for client in clients:
            client.close()
        inbox.close()

    run(scenario())


def test_a_stopped_acceptor_leaves_the_backlog_to_its_successor(run: Run, tmp_path: Path) -> None:
    """Under socket activation the next daemon answers those who wait."""

    async def scenario() -> None:
        first, second = Inbox(), Inbox()
        loop = asyncio.get_running_loop()
        with listen_unix(tmp_path / "s") as listener:
            Acceptor(listener.socket, first.take, loop=loop).stop()
            with connect_unix(tmp_path / "s"):
                successor = Acceptor(listener.socket, second.take, loop=loop)
                await second.until(1)
                successor.stop()
        assert first.sockets == []
        second.close()

    run(scenario())


def test_running_out_of_descriptors_is_told_and_ridden_out(run: Run, tmp_path: Path) -> None:
    """The listening socket stays readable, so the loop would spin; it rests instead."""

    async def scenario() -> None:
        inbox = Inbox()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with listen_unix(tmp_path / "s") as listener, connect_unix(tmp_path / "s"):
            acceptor = Acceptor(
                listener.socket,
                inbox.take,
                loop=asyncio.get_running_loop(),
                on_exhausted=inbox.note,
            )
            free = os.dup(0)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                await inbox.until(0, num_exhausted=1)
                assert acceptor._pause is not None
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            await inbox.until(1)
            acceptor.stop()
        assert len(inbox.exhausted) == 1
        inbox.close()

    run(scenario())


def test_stopping_while_it_rests_is_final(run: Run, tmp_path: Path) -> None:
    """No timer brings it back."""

    async def scenario() -> None:
        inbox = Inbox()
        with listen_unix(tmp_path / "s") as listener:
            acceptor = Acceptor(listener.socket, inbox.take, loop=asyncio.get_running_loop())
            acceptor._rest()
            acceptor.stop()
            assert acceptor._pause is not None
            assert acceptor._pause.cancelled()

    run(scenario())
