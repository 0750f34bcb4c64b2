"""Whether anybody may still be reading: with real processes that live, die and cannot be seen."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from prefilld.lost_peers import LostPeers
from shared.daemon.instance import start_time
from tests.support.descriptors import num_descriptors
from tests.unit.shared.daemon.kit import run, turns


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that live until they are killed."""
    started = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    yield started
    for process in started:
        end(process)
        assert process.stdin is not None
        process.stdin.close()


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def find(peers: LostPeers, process: subprocess.Popen[bytes], *, start_offset: int = 0) -> None:
    peers.found(process.pid, (start_time(process.pid) or 0) + start_offset)


def test_a_peer_that_died_is_gone_at_once(processes: list[subprocess.Popen[bytes]]) -> None:
    """Nothing has to be kept from anybody."""

    async def scene() -> None:
        told: list[int] = []
        peers = LostPeers(loop=asyncio.get_running_loop(), on_gone=told.append)
        find(peers, processes[0])
        end(processes[0])
        assert peers.lost()
        await turns()
        assert told == []

    run(scene())


def test_each_peer_in_doubt_is_told_of_with_how_many_are_left(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Quarantine ends only with the last of them."""

    async def scene() -> None:
        gone: asyncio.Queue[int] = asyncio.Queue()
        peers = LostPeers(loop=asyncio.get_running_loop(), on_gone=gone.put_nowait)
        for process in processes:
            find(peers, process)
            assert not peers.lost()
        for process, num_left in zip(processes, (1, 0), strict=True):
            end(process)
            assert await gone.get() == num_left
        peers.close()

    run(scene())


def test_a_peer_that_is_lost_again_and_again_is_watched_once(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """A daemon whose links break must not run out of descriptors for it, and ends doubt once."""

    async def scene() -> None:
        gone: asyncio.Queue[int] = asyncio.Queue()
        peers = LostPeers(loop=asyncio.get_running_loop(), on_gone=gone.put_nowait)
        find(peers, processes[0])
        peers.lost()
        num_before = num_descriptors()
        for _ in range(5):
            find(peers, processes[0])
            assert not peers.lost()
        assert num_descriptors() == num_before
        end(processes[0])
        assert await gone.get() == 0
        await turns()
        assert gone.empty()
        peers.close()

    run(scene())


def test_a_peer_that_cannot_be_watched_is_never_proved_gone(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    """Its pid is another process by now; only the time of grace ends its quarantine."""

    async def scene() -> None:
        told: list[int] = []
        peers = LostPeers(loop=asyncio.get_running_loop(), on_gone=told.append)
        assert not peers.lost(), "nobody was ever found"
        find(peers, processes[0], start_offset=1)
        end(processes[0])
        assert not peers.lost()
        await turns()
        assert told == []

    run(scene())


def test_a_closed_watch_tells_nothing(processes: list[subprocess.Popen[bytes]]) -> None:
    """The daemon is ending; nobody is there to be told."""

    async def scene() -> None:
        told: list[int] = []
        peers = LostPeers(loop=asyncio.get_running_loop(), on_gone=told.append)
        find(peers, processes[0])
        peers.lost()
        find(peers, processes[1])
        peers.close()
        for process in processes:
            end(process)
        await turns()
        assert told == []

    run(scene())
