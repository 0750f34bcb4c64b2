"""Which process this is, told to the peer so that another can never be mistaken for it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from protocol.messages import Instance

PF_EXITING = 0x4
"""The kernel's flag of a task that is being torn down."""

SIGKILL_PENDING = 1 << (signal.SIGKILL - 1)
"""In a mask of signals."""


def this_instance() -> Instance:
    """Describe this process as it sees itself."""
    return Instance(
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        pid=os.getpid(),
        start_time=start_time("self") or 0,
        pid_namespace=Path("/proc/self/ns/pid").stat().st_ino,
        shm_device=_device_of("/dev/shm"),  # noqa: S108  the mount itself, nothing is written
    )


def start_time(pid: int | str) -> int | None:
    """Return when a process started, in clock ticks since boot; None where it cannot be seen."""
    stat = _stat_of(pid)
    return None if stat is None else int(stat[19])


def is_ending(pid: int) -> bool:
    """Whether a process is on its way out, and can do nothing but let go of what it holds.

    Killed, or ending by itself: until the kernel has torn all of it down, which takes half a second
    where there are many gigabytes on a GPU, its locks, sockets and memory are still its own.
    """
    stat = _stat_of(pid)
    if stat is None:
        return False
    state, flags, pending = stat[0], int(stat[6]), int(stat[28])
    return state in "ZX" or bool(flags & PF_EXITING or pending & SIGKILL_PENDING)


def open_pidfd(pid: int, expected_start_time: int) -> int | None:
    """Return a descriptor that becomes readable when that very process is gone.

    Args:
        pid: As this process sees it (SO_PEERCRED), not as the peer sees itself.
        expected_start_time: What the peer said of itself in HELLO or WELCOME.

    Returns:
        None where the process cannot be watched: it lives in a PID namespace that we do not
        see into, or the pid belongs to another process by now.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return None
    if start_time(pid) != expected_start_time:
        os.close(pidfd)
        return None
    return pidfd


def _stat_of(pid: int | str) -> list[str] | None:
    """Return proc(5)'s fields of a process from its state on; None where it cannot be seen."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses; what follows the last is regular.
    return stat.rpartition(")")[2].split()


def _device_of(path: str) -> int:
    try:
        return os.stat(path).st_dev
    except OSError:
        return 0
