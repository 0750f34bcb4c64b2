"""Stops one thread of a process and keeps it stopped; run inside a test's machine, as root.

    python wedge.py PID NAME

A thread in a GPU call that never returns looks like that from outside: the other threads go on.
Prints `wedged`, and ends with the thread.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
WALL = 0x40000000
"""Wait for a thread, which is nobody's child."""


def main() -> None:
    """Find the thread, stop it, wait."""
    pid, name = int(sys.argv[1]), sys.argv[2]
    (thread_id,) = (
        int(task.name)
        for task in Path(f"/proc/{pid}/task").iterdir()
        if (task / "comm").read_text().strip() == name
    )
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
        if libc.ptrace(request, thread_id, None, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(thread_id, WALL)
    print("wedged", flush=True)
    # Whatever else it reports leaves it stopped; its end must be taken, or the process stays.
    while not os.WIFSIGNALED(os.waitpid(thread_id, WALL)[1]):
        pass


if __name__ == "__main__":
    main()
