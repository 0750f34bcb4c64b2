"""A process that is ending and holds a daemon's socket: what a killed daemon is for a moment."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shared.daemon.instance import is_ending
from tests.support.pair import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOLD = """
import ctypes, os, sys, threading
from protocol.listener import listen_unix
listener = listen_unix(sys.argv[1])
def last():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=last).start()
ctypes.CDLL(None).pthread_exit(None)
"""
"""Its first thread has ended, another lives: to the kernel it is a zombie that holds everything."""


@contextmanager
def ending_holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Have a process listen at a path while it is ending; closing its stdin lets it end."""
    with subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE) as holder:
        wait_until(lambda: is_ending(holder.pid), what="the holder's first thread has ended")
        yield holder
