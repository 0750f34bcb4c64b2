"""Whether a process is gone: proved, or not known."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator

import pytest

from shared.daemon.instance import start_time
from shared.daemon.peer_watch import PeerWatch
from tests.unit.shared.daemon.kit import is_closed, run, turns


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that lives until it is killed."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def watch_of(process: subprocess.Popen[bytes], *, start_offset: int = 0) -> PeerWatch:
    started = start_time(process.pid)
    assert started is not None
    return PeerWatch(
        pid=process.pid, start_time=started + start_offset, loop=asyncio.get_running_loop()
    )


def test_a_process_is_gone_only_once_it_has_died(process: subprocess.Popen[bytes]) -> None:
    async def scene() -> None:
        watch = watch_of(process)
        assert not watch.is_gone
        process.kill()
        process.wait()
        assert watch.is_gone
        watch.close()

    run(scene())


def test_the_callback_comes_once_and_only_when_the_process_is_gone(
    process: subprocess.Popen[bytes],
) -> None:
    """A second call replaces nothing: the first asker is told."""

    async def scene() -> None:
        watch = watch_of(process)
        gone = asyncio.Event()
        others: list[str] = []
        watch.when_gone(gone.set)
        watch.when_gone(lambda: others.append("second"))
        await turns()
        assert not gone.is_set()
        process.kill()
        await gone.wait()
        await turns()
        assert others == []
        assert not watch.is_gone, "it is closed once it has told"

    run(scene())


def test_a_closed_watch_tells_nothing_and_holds_no_descriptor(
    process: subprocess.Popen[bytes],
) -> None:
    async def scene() -> None:
        watch = watch_of(process)
        fd = watch._pidfd
        assert fd is not None
        told: list[None] = []
        watch.when_gone(lambda: told.append(None))
        watch.close()
        watch.close()
        assert is_closed(fd)
        process.kill()
        process.wait()
        await turns()
        assert told == []

    run(scene())


def test_a_process_that_cannot_be_watched_is_never_proved_gone(
    process: subprocess.Popen[bytes],
) -> None:
    """Another start time is another process: its death proves nothing about the peer."""

    async def scene() -> None:
        watch = watch_of(process, start_offset=1)
        told: list[None] = []
        watch.when_gone(lambda: told.append(None))
        process.kill()
        process.wait()
        await turns()
        assert not watch.is_gone
        assert told == []
        watch.close()

    run(scene())


def test_descriptors_above_1023_are_watched_too(process: subprocess.Popen[bytes]) -> None:
    """`select` would fail there, and a daemon with many clients is there soon."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1100:
        pytest.skip("this user may not open so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))

    async def scene() -> None:
        low = watch_of(process)
        assert low._pidfd is not None
        high_fd = os.dup2(low._pidfd, 1050, inheritable=False)
        low.close()
        low._pidfd = high_fd
        assert not low.is_gone
        process.kill()
        process.wait()
        assert low.is_gone
        low.close()

    try:
        run(scene())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
