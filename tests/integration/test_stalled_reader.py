"""A thousand requests while nobody reads the daemons' logs: nobody waits, and losses are told."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.support.exposition import Exposition
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

NUM_REQUESTS = 1000
NUM_CLIENTS = 8
DROPPED = "kvpair_log_dropped_lines_total"


class StalledPair(Pair):
    """A pair whose logs go into pipes that are full most of the time, as a stuck journal's are."""

    def __enter__(self) -> StalledPair:
        self._readers = {}
        for name in DAEMONS:
            os.mkfifo(self.log_path(name))
            # For writing too, so that neither side waits for the other to be there.
            self._readers[name] = os.open(self.log_path(name), os.O_RDWR | os.O_NONBLOCK)
        super().__enter__()
        return self

    def tail(self, num_lines: int = 20) -> str:
        """Nothing: reading the pipes is what these tests are about."""
        return f"(the last {num_lines} lines were not read)"

    def read(self, name: DaemonName) -> bytes:
        """Return what is in a daemon's pipe now."""
        try:
            return os.read(self._readers[name], 1 << 16)
        except BlockingIOError:
            return b""

    def dropped(self, name: DaemonName) -> float:
        """Return how many lines a daemon could not write."""
        client = self.client if name == "prefilld" else self.decoded_client
        return Exposition(client.metrics())[DROPPED]

    def close_pipes(self) -> None:
        for descriptor in self._readers.values():
            os.close(descriptor)


def test_a_thousand_requests_with_debug_logs_to_a_reader_that_does_not_read(
    tmp_path: Path,
) -> None:
    """Every request is answered, the queue stays bounded, and what was dropped is counted."""
    received = {name: bytearray() for name in DAEMONS}
    with StalledPair(tmp_path, model=write_tiny_model(tmp_path)) as pair:

        def ask(number: int) -> int:
            prompt = [2 + number % 200, 5, 6]
            return len(pair.client.generate(prompt, max_tokens=3, ignore_eos=True).ids)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            assert set(pool.map(ask, range(NUM_REQUESTS))) == {3}
        pair.wait_settled()
        dropped = {name: pair.dropped(name) for name in DAEMONS}
        assert all(count > 0 for count in dropped.values()), dropped

        is_over = threading.Event()

        def drain() -> None:
            while not is_over.wait(0.01):
                for name in DAEMONS:
                    received[name] += pair.read(name)

        draining = threading.Thread(target=drain)
        draining.start()
        for name in DAEMONS:
            wait_until(
                lambda name=name: b'"log.dropped"' in received[name],
                what=f"{name} tells what it dropped once it can",
            )
            assert pair.dropped(name) == dropped[name], "nothing more is lost by then"
        pair.stop()
        is_over.set()
        draining.join()
        for name in DAEMONS:
            received[name] += pair.read(name)
        pair.close_pipes()
    for name in DAEMONS:
        assert pair.process(name).returncode == 0
        lines = [json.loads(line) for line in received[name].splitlines()]
        told = sum(line["num_lines"] for line in lines if line["event"] == "log.dropped")
        assert told == dropped[name]
        assert lines[-1]["event"] == "daemon.stopped"


def test_a_daemon_whose_logs_nobody_reads_still_ends_in_time(tmp_path: Path) -> None:
    """The last lines are worth a second, and no more."""
    with StalledPair(tmp_path, model=write_tiny_model(tmp_path)) as pair:
        descriptor = os.open(pair.log_path("decoded"), os.O_WRONLY | os.O_NONBLOCK)
        try:
            while True:
                os.write(descriptor, b"x" * 4096)
        except BlockingIOError:
            pass  # full: the daemon's own lines stay in its queue
        pair.stop()
        os.close(descriptor)
        pair.close_pipes()
    assert pair.process("decoded").returncode == 0
