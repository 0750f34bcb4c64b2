"""A daemon's socket, with its faults told as the user's to mend."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from protocol.acceptor import Acceptor
from protocol.errors import AddressInUseError, UnixSocketError
from protocol.listener import Listener, inherit_unix, listen_unix
from shared.daemon.activation import take_activated
from shared.daemon.instance import is_ending, start_time
from shared.errors import ConfigError, EnvironmentUnsupportedError, PredecessorEndingError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, MutableMapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

PATIENCE_S = 10.0
"""For a predecessor that is ending: many times what tearing down any that works takes."""

RETRY_S = 0.01
"""Between two looks whether it is gone."""


def open_listener(
    path: Path, *, environ: MutableMapping[str, str], group: str | None = None
) -> Listener:
    """Listen at `path`, alone; before anything is loaded, so that a second instance ends at once.

    Args:
        path: Where.
        environ: The environment; a socket that a service manager passed is taken out of it.
        group: Whose members may connect, where the socket is ours to make.

    Raises:
        EnvironmentUnsupportedError: Another daemon has the socket.
        ConfigError: No socket can be there, or the one that was passed is not it.
    """
    with _told_to_the_user():
        return _listen(path, take_activated(environ), group)


async def succeed(
    path: Path,
    *,
    environ: MutableMapping[str, str],
    group: str | None,
    log: FilteringBoundLogger,
    meanwhile: Callable[[], object],
    patience_s: float = PATIENCE_S,
) -> Listener:
    """Listen at `path` as `open_listener` does, also where the daemon before is not torn down yet.

    A process that was killed keeps socket and lock until the last of its memory is gone.  A
    successor that is started at once does meanwhile what needs neither.

    Args:
        path: Where.
        environ: See `open_listener`.
        group: See `open_listener`.
        log: Told for how long the start stood still, where it did.
        meanwhile: Called once, where there is something to wait for.
        patience_s: How long to wait, what `meanwhile` takes not counted.

    Raises:
        EnvironmentUnsupportedError: A daemon that lives has the socket.
        PredecessorEndingError: One that is ending has not let go of it in time.
        ConfigError: See `open_listener`.
    """
    activated = take_activated(environ)
    num_tries = 0
    with _told_to_the_user(), activated or nullcontext():
        while True:
            try:
                listener = _listen(path, None if activated is None else activated.dup(), group)
            except AddressInUseError as error:
                if not _lets_go(error.pid, is_first=num_tries == 0):
                    raise
                pid = error.pid
            else:
                break
            if num_tries == 1:  # twice now, so it does take time
                meanwhile()
            if num_tries * RETRY_S >= patience_s:
                raise PredecessorEndingError(
                    f"process {pid} is ending, and after {patience_s:g} s still has {path}",
                    hint="start again later; a GPU that hangs may keep it from ending at all",
                )
            num_tries += 1
            await asyncio.sleep(RETRY_S)
    if num_tries:
        log.info("predecessor.ended", pid=pid, waited_s=round(num_tries * RETRY_S, 3))
    return listener


def _lets_go(pid: int | None, *, is_first: bool) -> bool:
    """Whether the process that has a path will let go of it, or may just have.

    Args:
        pid: The process, as far as it is known.
        is_first: Nobody has waited yet.  A process that is seen no more had the path a moment ago;
            one that never is lives in another PID namespace.
    """
    if pid is None:
        return False
    return is_ending(pid) or (is_first and start_time(pid) is None)


def _listen(path: Path, activated: socket.socket | None, group: str | None) -> Listener:
    return listen_unix(path, group=group) if activated is None else inherit_unix(activated, path)


@contextmanager
def _told_to_the_user() -> Iterator[None]:
    """Turn a socket's faults into what the user can mend."""
    try:
        yield
    except AddressInUseError as error:
        raise EnvironmentUnsupportedError(str(error)) from error
    except UnixSocketError as error:
        raise ConfigError(str(error)) from error


class Door:
    """A daemon's way in: hands over every connection, until it is shut.

    Args:
        listener: The daemon's socket; closed together with the door.
        on_connection: Gets each connection, which is its own.
    """

    def __init__(
        self,
        listener: Listener,
        on_connection: Callable[[socket.socket], None],
        *,
        loop: asyncio.AbstractEventLoop,
        log: FilteringBoundLogger,
    ) -> None:
        self._listener = listener
        self._acceptor = Acceptor(
            listener.socket,
            on_connection,
            loop=loop,
            on_exhausted=lambda error: log.error("listener.exhausted", error=str(error)),
        )

    def shut(self) -> None:
        """Accept no more, and remove the socket.  Safe to repeat."""
        self._acceptor.stop()
        self._listener.close()
