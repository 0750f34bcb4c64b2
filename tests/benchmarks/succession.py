"""A killed daemon and its successor, which is started beside it: how long everything took.

    teardown_s    from the kill until the dead process was gone
    load_s        from the successor's start until the pair served, but for what it waited
    waited_s      how long the successor stood still, at most, for socket and memory of the dead one
    recovery_s    from the kill until the pair served
    overlap_s     what was saved: teardown_s + load_s - recovery_s

Were the successor started behind the teardown, recovery would be the sum of teardown and load.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shared.clock import NS_PER_S
from shared.errors import ExitCode
from tests.support.pair import DAEMONS, wait_until

if TYPE_CHECKING:
    import subprocess

    from tests.support.pair import DaemonName, Pair

RECOVERY_TIMEOUT_S = 120.0
"""For a daemon to load its model anew."""


class Death:
    """A daemon is killed, and its successor started beside it, when this is made.

    Args:
        pair: Whose daemon.
        name: Which one.
    """

    def __init__(self, pair: Pair, name: DaemonName) -> None:
        self._pair, self._name = pair, name
        self._num_lines = len(pair.log(name))
        predecessor = pair.process(name)
        self.killed_ns = time.monotonic_ns()
        predecessor.kill()
        self._started_ns = time.monotonic_ns()
        pair.start(name)
        self._num_starts = 1
        reaper = ThreadPoolExecutor(1)
        self._ended_ns = reaper.submit(_ended_ns, predecessor)
        reaper.shutdown(wait=False)

    def recovered(self) -> dict[str, float]:
        """Wait until the pair serves, and return how long everything took."""
        wait_until(self._serves, timeout_s=RECOVERY_TIMEOUT_S, what=f"the new {self._name} serves")
        serves_ns = time.monotonic_ns()
        teardown_s = (self._ended_ns.result(timeout=30) - self.killed_ns) / NS_PER_S
        waited_s = self._waited_s()
        load_s = (serves_ns - self._started_ns) / NS_PER_S - waited_s
        recovery_s = (serves_ns - self.killed_ns) / NS_PER_S
        figures = {
            "teardown_s": teardown_s,
            "load_s": load_s,
            "waited_s": waited_s,
            "recovery_s": recovery_s,
            "overlap_s": teardown_s + load_s - recovery_s,
            "starts": float(self._num_starts),
        }
        return {f"{self._name}_killed_{what}": value for what, value in figures.items()}

    def _serves(self) -> bool:
        status = self._pair.process(self._name).poll()
        if status is not None:
            assert status == ExitCode.BUSY, (
                f"{self._name} ended with {status}:\n{self._pair.tail()}"
            )
            self._started_ns = time.monotonic_ns()
            self._num_starts += 1
            self._pair.start(self._name)
        return all(self._pair.state(each) == "serving" for each in DAEMONS)

    def _waited_s(self) -> float:
        """Return how long the successor says that it waited for what the dead one held."""
        waited_s = 0.0
        for line in self._pair.log(self._name)[self._num_lines :]:
            if line["event"] == "predecessor.ended":
                waited_s += line["waited_s"]
            elif line["event"] == "model.loaded":
                waited_s += line["pool_s"]
        return waited_s


def _ended_ns(process: subprocess.Popen[bytes]) -> int:
    """Wait for a process's end, and return when it was gone."""
    process.wait(timeout=30)
    return time.monotonic_ns()
