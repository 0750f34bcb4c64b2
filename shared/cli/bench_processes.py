"""Clients in processes of their own, so that what is measured is the daemons and not a client.

One Python process reads some tens of streams without being late; more would wait for each other.
The parent gives each process its share of the requests, hears of each one that is over, and may
stop them all.  A process whose parent is gone hangs up and ends.
"""

from __future__ import annotations

import asyncio
import enum
import gc
import math
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from shared.cli.bench_plan import Ask
from shared.cli.bench_stream import Heard, hear_all
from shared.clock import NS_PER_S
from shared.errors import KvpairError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType
    from typing import Self

    from shared.cli.bench_stream import Listener

STREAMS_A_PROCESS = 8
CORES_A_PROCESS = 4
"""The rest are the daemons'."""

LEAD_S = 0.05
"""From the last order to the first request: every process has its orders by then."""

START_TIMEOUT_S = 60.0
"""For all processes to import what they need, on a machine that is busy."""

STOP_TIMEOUT_S = 10.0
"""For clients that were told to stop to hang up, and for processes to end."""


class _Sign(enum.Enum):
    READY = enum.auto()
    STOP = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    asks: Sequence[Ask]
    concurrency: int
    begin_ns: int
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Over:
    busy: float
    """Share of the job's time that the process computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a run went."""

    is_out_of_time: bool
    busy: float
    """Share of the time that the busiest process computed; near 1 it was late."""


def num_processes_for(max_at_once: int) -> int:
    """Return how many processes so many streams take, as far as this machine has the cores."""
    num_cores = len(os.sched_getaffinity(0))
    return min(math.ceil(max_at_once / STREAMS_A_PROCESS), max(1, num_cores // CORES_A_PROCESS))


class ClientProcesses:
    """The processes; a context manager.

    Args:
        socket: prefilld's.
        vocab_size: Of which prompts are made.
        num_processes: At least 1.
    """

    def __init__(self, socket: Path, *, vocab_size: int, num_processes: int) -> None:
        self._socket, self._vocab_size = str(socket), vocab_size
        self._num_processes = num_processes
        self._processes: list[BaseProcess] = []
        self._orders: list[Connection] = []
        self._reports: list[Connection] = []
        self._is_cancelled = self._is_ordering = False

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # nothing of this process is theirs
        for _ in range(self._num_processes):
            their_orders, orders = context.Pipe(duplex=False)
            reports, their_reports = context.Pipe(duplex=False)
            self._orders.append(orders)
            self._reports.append(reports)
            process = context.Process(
                target=_serve,
                args=(their_orders, their_reports, self._socket, self._vocab_size),
                daemon=True,
            )
            with _interrupts_blocked():
                process.start()
            self._processes.append(process)
            their_orders.close()
            their_reports.close()  # now the process alone holds that end, and its death is seen
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for reports in self._reports:
            if not reports.poll(max(0.0, deadline_s - time.monotonic())):
                raise KvpairError(f"the clients did not start within {START_TIMEOUT_S:g} s")
            _receive(reports)

    def run(
        self,
        asks: Sequence[Ask],
        *,
        concurrency: int,
        is_open: bool,
        time_limit_s: float,
        on_heard: Listener,
    ) -> Run:
        """Have requests sent, and return when each is over.

        Args:
            asks: In the order in which they are due.
            concurrency: Requests at a time, in all.
            is_open: See `hear_all`.
            time_limit_s: How long from now until what still runs is cut.
            on_heard: Told of each request, in the order in which they end.

        Raises:
            KvpairError: A process died, or did not stop.
        """
        begin_ns = time.monotonic_ns() + round(LEAD_S * NS_PER_S)
        num_shares = min(self._num_processes, concurrency)
        self._is_ordering = True
        for index in range(num_shares):
            job = _Job(
                asks=asks[index::num_shares],
                concurrency=len(range(index, concurrency, num_shares)),
                begin_ns=begin_ns,
                is_open=is_open,
            )
            self._send(index, job)
        self._is_ordering = False
        if self._is_cancelled:
            self._stop()
        running, busy, is_out_of_time = self._reports[:num_shares], 0.0, False
        deadline_s = time.monotonic() + time_limit_s
        while running:
            ready = wait(running, timeout=max(0.0, deadline_s - time.monotonic()))
            for reports in [each for each in running if each in ready]:
                message = _receive(reports)
                if isinstance(message, _Over):
                    running.remove(reports)
                    busy = max(busy, message.busy)
                else:
                    assert isinstance(message, Heard)
                    on_heard(message)
            if time.monotonic() >= deadline_s and running:
                if is_out_of_time:
                    raise KvpairError(f"the clients did not stop within {STOP_TIMEOUT_S:g} s")
                is_out_of_time, deadline_s = True, time.monotonic() + STOP_TIMEOUT_S
                self._stop()
        return Run(is_out_of_time=is_out_of_time, busy=busy)

    def cancel(self) -> None:
        """Cut what runs and send nothing more; `run` returns soon, also where it is still to come.

        A signal's handler may call it: an order so short is written at once or not at all.  While
        longer ones are given out it waits for their end, and would else be lost or torn.
        """
        self._is_cancelled = True
        if not self._is_ordering:
            self._stop()

    def _stop(self) -> None:
        for index in range(len(self._orders)):
            self._send(index, _Sign.STOP)

    def _send(self, index: int, order: object) -> None:
        with suppress(BrokenPipeError):  # a process that died; whoever waits for it sees that
            self._orders[index].send(order)

    def _end(self) -> None:
        for connection in (*self._orders, *self._reports):
            connection.close()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._processes:
            process.join(max(0.0, deadline_s - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes that Ctrl-C does not reach: it is the parent's to understand.

    One that comes inside is the parent's right afterwards; a process keeps what it was born with.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _receive(connection: Connection) -> object:
    try:
        return connection.recv()
    except (EOFError, OSError) as error:  # the latter in the middle of a report
        raise KvpairError("a process of clients has died", hint="its stderr says why") from error


# --- in each process -------------------------------------------------------------------------


def _serve(orders: Connection, reports: Connection, socket: str, vocab_size: int) -> None:
    """Carry out one order after the other until the parent hangs up."""
    gc.freeze()  # what was imported stays; to look through it again would delay a token for ms
    with suppress(BrokenPipeError, EOFError):
        reports.send(_Sign.READY)
        while True:
            order = orders.recv()
            if isinstance(order, _Job):  # a STOP may come when all is over
                began_s, began_cpu_s = time.monotonic(), time.process_time()
                uvloop.run(_carry_out(order, orders, reports, socket, vocab_size))
                took_s = max(time.monotonic() - began_s, 1e-9)
                reports.send(_Over(busy=(time.process_time() - began_cpu_s) / took_s))


async def _carry_out(
    job: _Job, orders: Connection, reports: Connection, socket: str, vocab_size: int
) -> None:
    """Ask a job's requests, until they are over or anything comes from the parent."""

    def tell(heard: Heard) -> None:
        with suppress(BrokenPipeError):  # nobody is there any more to hear of it
            reports.send(heard)

    asking = asyncio.ensure_future(
        hear_all(
            socket,
            job.asks,
            vocab_size=vocab_size,
            begin_ns=job.begin_ns,
            concurrency=job.concurrency,
            is_open=job.is_open,
            on_heard=tell,
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_reader(orders)
        asking.cancel()

    loop.add_reader(orders, stop)
    try:
        with suppress(asyncio.CancelledError):
            await asking
    finally:
        loop.remove_reader(orders)
        os.set_blocking(orders.fileno(), True)  # uvloop watches only what does not block
