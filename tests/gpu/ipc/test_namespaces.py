"""What containers and units put between two daemons; needs root, to make namespaces and users."""

from __future__ import annotations

import os

import pytest

from shared.kv.layout import KVLayout
from tests.gpu.ipc.processes import Process, WorkerError

pytestmark = pytest.mark.gpu

PRIVATE_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$0" "$@"')
OWN_PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
OWN_IPC = ("unshare", "--ipc")

REFUSED = [
    pytest.param((), PRIVATE_SHM, "PoolMappingError.*do not share /dev/shm", id="private shm"),
    pytest.param(OWN_PIDS, OWN_PIDS, "PoolMappingError.*need two pids", id="both are pid 1"),
]
TAKEN = [
    pytest.param((), OWN_PIDS, id="pid namespaces"),
    pytest.param((), OWN_IPC, id="ipc namespaces"),
]
NOBODY = 65_534
IS_ROOT = os.geteuid() == 0

Prefix = tuple[str, ...]


def map_across(maker_prefix: Prefix, reader_prefix: Prefix, layout: KVLayout) -> float:
    """Write in one process, and return what the other reads when the event says so."""
    maker, reader = Process(prefix=maker_prefix), Process(prefix=reader_prefix)
    try:
        maker.tell("begin", 0)
        reader.do("begin", 0)
        maker.answer()
        reader.do("map", maker.do("create", layout), layout)
        slot = maker.do("write", 3, 5.0, after_ms=50.0)
        return reader.do("read_when_done", slot, 3)
    finally:
        reader.kill()
        maker.kill()


@pytest.mark.parametrize(("maker", "reader", "message"), REFUSED if IS_ROOT else [])
def test_what_keeps_the_pool_from_opening_is_named(
    maker: Prefix, reader: Prefix, message: str, layout: KVLayout
) -> None:
    """At hand-shake, and not by a request that hangs."""
    with pytest.raises(WorkerError, match=message):
        map_across(maker, reader, layout)


@pytest.mark.parametrize("nobody", ["maker", "reader"] if IS_ROOT else [])
def test_events_do_not_open_for_another_user(nobody: str, layout: KVLayout) -> None:
    """Not even between root and another: so HELLO wants one user on GPUs."""
    processes = {"maker": Process(), "reader": Process()}
    maker, reader = processes.values()
    try:
        processes[nobody].do("become", NOBODY)
        for process in processes.values():
            process.do("begin", 0)
        with pytest.raises(WorkerError, match=r"event 0 does not open .*run as two users"):
            reader.do("map", maker.do("create", layout), layout)
    finally:
        reader.kill()
        maker.kill()


@pytest.mark.parametrize(("maker", "reader"), TAKEN if IS_ROOT else [])
def test_what_does_not_matter_is_no_reason(maker: Prefix, reader: Prefix, layout: KVLayout) -> None:
    """So HELLO refuses none of these."""
    assert map_across(maker, reader, layout) == 5.0
