"""Clients that do nothing but note when each token came, in processes of their own.

What one of them asks and hears is `kvpair bench`'s; here several groups of them may ask at the same
time, and a failed request is an error.
"""

from __future__ import annotations

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

import uvloop

from shared.cli.bench_plan import Ask
from shared.cli.bench_stream import Heard, hear_all
from shared.clock import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

__all__ = ["Ask", "Clients", "Heard"]


def hear_share(socket: str, asks: Sequence[Ask], vocab_size: int, begin_ns: int) -> list[Heard]:
    """Send requests at their times, whatever else runs, and hear them out.

    Runs in a process of its own.
    """
    heard: list[Heard] = []
    uvloop.run(
        hear_all(
            socket,
            asks,
            vocab_size=vocab_size,
            begin_ns=begin_ns,
            concurrency=len(asks),
            is_open=True,
            on_heard=heard.append,
        )
    )
    return heard


class Clients:
    """A pool of client processes; a context manager."""

    def __init__(self, socket: Path, *, vocab_size: int, num_processes: int) -> None:
        self._socket, self._vocab_size = str(socket), vocab_size
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(
            num_processes, mp_context=multiprocessing.get_context("spawn")
        )

    def __enter__(self) -> Clients:
        for future in [self._pool.submit(time.sleep, 0.5) for _ in range(self._num_processes)]:
            future.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, asks: Sequence[Ask], *, lead_s: float = 1.0) -> list[Future[list[Heard]]]:
        """Send requests from all processes; their clocks start together, `lead_s` from now."""
        begin_ns = time.monotonic_ns() + round(lead_s * NS_PER_S)
        shares = [list(asks[index :: self._num_processes]) for index in range(self._num_processes)]
        return [
            self._pool.submit(hear_share, self._socket, share, self._vocab_size, begin_ns)
            for share in shares
            if share
        ]

    def hear(self, asks: Sequence[Ask], *, lead_s: float = 1.0) -> list[Heard]:
        """Send requests and wait for all of their answers.

        Raises:
            RuntimeError: One failed.
        """
        heard = [each for future in self.begin(asks, lead_s=lead_s) for each in future.result()]
        for each in heard:
            if each.failure:
                raise RuntimeError(str(each.failure))
        return heard
