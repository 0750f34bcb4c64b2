"""Who a process is, and how its end is seen."""

from __future__ import annotations

import os
import select
import subprocess

from shared.daemon.instance import open_pidfd, start_time, this_instance


def test_this_process_is_described_as_it_sees_itself() -> None:
    instance = this_instance()
    assert instance.pid == os.getpid()
    assert instance.start_time == start_time(os.getpid()) != 0
    assert instance == this_instance()


def test_a_pidfd_tells_when_the_process_is_gone() -> None:
    """The end of a connection is no proof of death; this is."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        started = start_time(process.pid)
        assert started is not None
        pidfd = open_pidfd(process.pid, started)
        assert pidfd is not None
        assert select.select([pidfd], [], [], 0)[0] == []
        process.kill()
        assert select.select([pidfd], [], [], 10)[0] == [pidfd]
        os.close(pidfd)


def test_another_process_of_the_same_pid_is_not_watched() -> None:
    """Pids are used again; the start time tells two processes apart."""
    assert open_pidfd(os.getpid(), (start_time(os.getpid()) or 0) + 1) is None


def test_an_unknown_pid_is_not_watched() -> None:
    assert start_time(2**22 + 1) is None
    assert open_pidfd(2**22 + 1, 0) is None
