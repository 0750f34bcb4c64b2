"""`shared.service.notify`: the service manager hears it, and can never hold us up."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

import pytest

from shared.service.notify import Notifier, watchdog_period_s


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_states_arrive_as_datagrams(kind: str, tmp_path: Path) -> None:
    """An address that begins with @ is abstract: the @ stands for a zero byte."""
    name = secrets.token_hex(8)
    address, bound = (f"@{name}", f"\0{name}") if kind == "abstract" else (str(tmp_path / "n"),) * 2
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(bound)
        manager.settimeout(10)
        notifier = Notifier(address)
        assert notifier.ready()
        assert notifier.status("two\nlines")
        assert notifier.alive()
        assert notifier.extend_timeout(1.5)
        assert notifier.reloading(now_ns=7_999)
        assert notifier.stopping(within_s=45)
        received = [manager.recv(4096) for _ in range(6)]
    assert received == [
        b"READY=1",
        b"STATUS=two lines",
        b"WATCHDOG=1",
        b"EXTEND_TIMEOUT_USEC=1500000",
        b"RELOADING=1\nMONOTONIC_USEC=7",
        b"STOPPING=1\nEXTEND_TIMEOUT_USEC=45000000",
    ]


@pytest.mark.parametrize("address", [None, "", "@", "relative/path", "vsock:2:1"])
def test_without_a_manager_nothing_is_sent(address: str | None) -> None:
    assert not Notifier(address).ready()


def test_a_manager_that_is_gone_raises_nothing(tmp_path: Path) -> None:
    assert not Notifier(str(tmp_path / "gone")).ready()


def test_a_manager_that_never_reads_does_not_block(tmp_path: Path) -> None:
    """Its queue fills after some datagrams; from then on they are simply not sent."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        notifier = Notifier(str(tmp_path / "n"))
        for _ in range(100_000):
            if not notifier.status("x" * 1000):
                return
    pytest.fail("the queue never filled")


def test_the_address_is_taken_out_of_the_environment() -> None:
    """A child with the variable could declare us ready."""
    environ = {"NOTIFY_SOCKET": "/n", "HOME": "/"}
    Notifier.from_environ(environ)
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("environ", "period_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_ours_only_where_it_names_us(
    environ: dict[str, str], period_s: float | None
) -> None:
    """A parent's watchdog, inherited, is not to be fed by its child; and no child sees ours."""
    assert watchdog_period_s(environ) == period_s
    assert environ == {}
