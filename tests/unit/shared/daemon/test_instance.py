"""Who a process is, and how its end is seen."""

from __future__ import annotations

import os
import select
import signal
import subprocess

from shared.daemon.instance import is_ending, open_pidfd, start_time, this_instance


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


def test_a_process_is_ending_from_the_kill_until_it_is_gone() -> None:
    """Its successor may wait for what it holds; nothing that lives lets go of anything."""
    assert not is_ending(os.getpid())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        assert not is_ending(process.pid)
        process.kill()
        assert is_ending(process.pid)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_ending(process.pid)
    assert not is_ending(process.pid)


def test_a_stopped_process_is_not_ending_until_it_is_killed() -> None:
    """It can go on at any time, with everything that it holds."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_ending(process.pid)
        process.kill()
