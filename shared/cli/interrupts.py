"""Ctrl-C while a line is edited, also in the moment just before readline waits for a key."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

NUDGE_S = 0.05
"""Pause between two attempts to interrupt the wait; nobody sees so short a delay."""

MAX_READ_BYTES = 64


@contextmanager
def late_interrupts_seen() -> Iterator[None]:
    """See every Ctrl-C at once inside; for the main thread.

    Python takes note of a signal when it comes and acts on it when it interrupts readline's wait.
    One that comes between readline's last look and its wait interrupts nothing, and would be acted
    on at the next key.  So a thread that hears of every signal goes on to interrupt the wait, with
    a signal that does nothing else, until the line is over.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    main_thread, is_over = threading.get_ident(), threading.Event()

    def nudge() -> None:
        while numbers := os.read(reader, MAX_READ_BYTES):
            if signal.SIGINT in numbers:
                while not is_over.wait(NUDGE_S):
                    signal.pthread_kill(main_thread, signal.SIGURG)

    thread = threading.Thread(target=nudge, name="nudge", daemon=True)
    former_handler = signal.signal(signal.SIGURG, lambda *_: None)
    former_fd = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        signal.set_wakeup_fd(former_fd)
        os.close(writer)
        thread.join()
        os.close(reader)
        signal.signal(signal.SIGURG, former_handler)
