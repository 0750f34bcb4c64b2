"""What the tests of both daemons share: a service without a process, a loop, a model."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Any

import uvloop

from shared.clock import FakeClock
from shared.config import resolve
from shared.config.sources import parse_assignment
from shared.daemon.model_host import ModelHost, load_model_host
from shared.daemon.quiet import QUIET_S
from shared.kv.allocator import BlockAllocator, BlockState
from shared.logs import LogWriter
from shared.service.frame import DaemonName, Service
from shared.service.notify import Notifier

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path


DEADLINE_S = 20.0
"""Far beyond what any of these tests takes; a hang fails instead of stopping everything."""

TURNS = 50
"""Turns of the loop after which whatever could follow from an event has followed."""


_made: list[socket.socket] = []
"""Sockets of the running test; `run` closes them."""


class RecordingService(Service):
    """A service whose fatal failures are kept for the test instead of ending the process."""

    clock: FakeClock

    def __init__(self, name: DaemonName, folder: Path, settings: dict[str, object]) -> None:
        self._null = os.open(os.devnull, os.O_WRONLY)
        self.log_writer = LogWriter(self._null, render_dropped=lambda _: b"")
        resolved = resolve(
            environ={"KVPAIR_SOCKET": str(folder / "p.sock")},
            flags=[parse_assignment(f"{key}={value}") for key, value in settings.items()],
            num_cores=2,
            system_file=folder / "none",
        )
        super().__init__(
            name=name,
            resolved=resolved,
            reread=lambda: resolved,
            writer=self.log_writer,
            notifier=Notifier(None),
            clock=FakeClock(),
        )
        self.failures: list[BaseException] = []

    def fatal(self, error: BaseException) -> None:
        self.failures.append(error)

    @property
    def now_s(self) -> float:
        return self.clock.monotonic_ns() / 1e9

    async def end(self) -> None:
        """Cancel every task, as the frame does at the end."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Give back what the service holds."""
        self.log_writer.shutdown(1.0)
        os.close(self._null)


async def failure_of_contradicting_books(
    service: RecordingService, allocator: BlockAllocator
) -> BaseException:
    """Break an idle daemon's books, let time pass, and return how it ends."""
    allocator._num[BlockState.ACTIVE] += 1
    allocator._is_checked = False

    def failures_in_time() -> list[BaseException]:
        service.clock.advance(QUIET_S)
        return service.failures

    await until(failures_in_time)
    return service.failures.pop()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever it returns
    """Run a coroutine to its end on a fresh loop of the kind that the daemons use.

    Whatever reaches the loop from a callback would end a daemon, so it fails the test.
    """
    reached_the_loop: asyncio.Queue[BaseException] = asyncio.Queue()

    def note(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        reached_the_loop.put_nowait(context.get("exception") or RuntimeError(context["message"]))

    async def bounded() -> Any:  # noqa: ANN401 - as above
        asyncio.get_running_loop().set_exception_handler(note)
        scene = asyncio.ensure_future(coroutine)
        failure = asyncio.ensure_future(reached_the_loop.get())
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait({scene, failure}, return_when=asyncio.FIRST_COMPLETED)
            if not scene.done():
                scene.cancel()
                await asyncio.wait({scene})
                raise failure.result()
            failure.cancel()
            return scene.result()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(bounded())
    finally:
        while _made:
            _made.pop().close()
    while not reached_the_loop.empty():
        raise reached_the_loop.get_nowait()
    return result


def owned(sock: socket.socket) -> socket.socket:
    """Have `run` close a socket in the end, if nobody has by then."""
    _made.append(sock)
    return sock


def socketpair(send_buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Return two connected, non-blocking sockets that `run` closes; the first has that buffer."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for sock in pair:
        owned(sock).setblocking(False)
    if send_buffer_bytes is not None:
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    return pair


async def turns(num_turns: int = TURNS) -> None:
    """Let the loop turn, for tests that show that something does not happen."""
    for _ in range(num_turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until the condition holds; what it watches has no event of its own."""
    while not condition():  # noqa: ASYNC110  what is watched has no event
        await asyncio.sleep(0.001)


def load_host(
    path: Path, settings: dict[str, object] | None = None, *, num_blocks: int = 16
) -> ModelHost:
    """Load a tiny model as a daemon does."""
    flags: dict[str, object] = {"model.path": path} | (settings or {})
    resolved = resolve(
        environ={},
        flags=[parse_assignment(f"{key}={value}") for key, value in flags.items()],
        num_cores=2,
        system_file=path.parent / "none",
    )
    return load_model_host(resolved.config, num_blocks=num_blocks)


def is_closed(fd: int) -> bool:
    """Whether a descriptor's number is free."""
    try:
        os.fstat(fd)
    except OSError:
        return True
    return False
