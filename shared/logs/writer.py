"""Log lines on their way out: a bounded queue and one thread that writes.

Whoever logs only puts a line into the queue.  A reader of stderr that has stopped (a stuck
journal, a pager) can therefore delay nobody but the writer; lines that find the queue full are
dropped and counted, and the count itself is logged as soon as a line can be written again.
"""

from __future__ import annotations

import itertools
import os
import queue
import select
import threading
from collections.abc import Callable

MAX_LINES = 2048
"""Lines that may wait: some 400 requests' at info, a few seconds of a busy pair, and at 8 KiB each
at most 16 MiB."""

MAX_BATCH_LINES = 256
"""Lines joined into one write when many wait."""


class _DropCount:
    """A count that any thread adds to, without a lock.

    Whoever holds a lock can be interrupted by a destructor that logs, in the same thread, and
    would then wait for itself.  `next` on a counter is one C call, which nothing interrupts.
    """

    def __init__(self) -> None:
        self._calls = itertools.count()
        self._num_looks = 0
        self._look_lock = threading.Lock()

    def add(self) -> None:
        """Count one line."""
        next(self._calls)

    def value(self) -> int:
        """Return the count; looking at the counter moves it, so looks are subtracted."""
        with self._look_lock:
            num_calls = next(self._calls)
            self._num_looks += 1
            return num_calls - self._num_looks + 1


class LogWriter:
    """Writes lines to a file descriptor from a thread of its own.

    Args:
        fd: An open descriptor; the caller keeps it open until `shutdown` has returned.
        render_dropped: Makes the line that reports how many lines were dropped.
        max_lines: Lines that may wait.
    """

    def __init__(
        self, fd: int, *, render_dropped: Callable[[int], bytes], max_lines: int = MAX_LINES
    ) -> None:
        self._fd = fd
        self._render_dropped = render_dropped
        self._max_lines = max_lines
        # SimpleQueue's put is one C call that cannot be interrupted half-way, so a line logged
        # by a destructor in the middle of another put does not dead-lock.
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._drops = _DropCount()
        self._num_reported = 0
        self._closed = False
        self._on_shutdown: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Lines that were never written because the queue was full or the descriptor failed."""
        return self._drops.value()

    def put(self, line: bytes) -> None:
        """Queue one line, its newline included.  Never blocks, never raises."""
        if self._closed or self._lines.qsize() >= self._max_lines:
            self._drops.add()
        else:
            self._lines.put(line)

    def call_on_shutdown(self, undo: Callable[[], None]) -> None:
        """Have `undo` called at the start of `shutdown`, the last one first."""
        self._on_shutdown.append(undo)

    def shutdown(self, deadline_s: float) -> bool:
        """Write what waits, for at most `deadline_s`, and end.  Safe to call again.

        Returns:
            Whether everything was written.
        """
        while self._on_shutdown:
            self._on_shutdown.pop()()
        if not self._closed:
            self._closed = True
            self._lines.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch = [self._lines.get()]
            while len(batch) < MAX_BATCH_LINES and batch[-1] is not None:
                try:
                    batch.append(self._lines.get_nowait())
                except queue.Empty:
                    break
            if batch[-1] is None:
                batch.pop()
                is_open = False
            lines = [line for line in batch if line is not None]
            if not self._write(b"".join(lines)):
                for _ in lines:
                    self._drops.add()
            self._report_dropped()

    def _report_dropped(self) -> None:
        num_dropped = self._drops.value()
        if num_dropped > self._num_reported and self._write(
            self._render_dropped(num_dropped - self._num_reported)
        ):
            self._num_reported = num_dropped

    def _write(self, data: bytes) -> bool:
        """Write everything, waiting as long as it takes; False where the descriptor is dead."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:  # a terminal that somebody else made non-blocking
                select.select([], [self._fd], [])
            except OSError:  # nobody is left to be told
                return False
        return True
