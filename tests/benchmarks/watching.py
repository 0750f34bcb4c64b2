"""What logs and metrics cost: a thousand short requests, debug logs, and a reader that is stalled.

python -m tests.benchmarks.watching
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from shared.model.fetch import fetch_model
from tests.support.pair import DAEMONS, DaemonName, Pair

MODEL = "smollm2-135m-instruct"
NUM_REQUESTS = 1000
NUM_CLIENTS = 8
NUM_TOKENS = 8
MAX_SHARE = 0.02
"""Of the steps' thread time, for log and metric calls together."""
MAX_ENGINE_CALL_MS = 1.0


class WatchedPair(Pair):
    """A pair of timed daemons whose logs go into pipes that nobody reads."""

    def start(self, name: DaemonName) -> subprocess.Popen[bytes]:
        """Start a timed daemon."""
        os.mkfifo(self.log_path(name))
        # For reading too, so that the daemon finds the pipe open and never empty.
        stderr = os.open(self.log_path(name), os.O_RDWR)
        flags = [f"--set={key}={_text(value)}" for key, value in self._settings.items()]
        command = [sys.executable, "-m", "tests.benchmarks.watched_daemon"]
        process = subprocess.Popen(
            [*command, str(self.result_path(name)), name, *flags], stderr=stderr, env=self.environ
        )
        self._processes[name] = process
        return process

    def result_path(self, name: DaemonName) -> Path:
        """Return where a daemon's figures are written at its end."""
        return self.folder / f"{name}.json"

    def tail(self, num_lines: int = 20) -> str:
        """Nothing: the pipes are full on purpose."""
        return f"(the last {num_lines} lines are in a pipe)"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def measure(model_file: Path, settings: Mapping[str, object]) -> dict[str, list[dict[str, Any]]]:
    """Serve the requests; return each daemon's figures."""
    with tempfile.TemporaryDirectory() as folder:
        with WatchedPair(Path(folder), model=model_file, settings=settings) as pair:

            def ask(number: int) -> int:
                prompt = [100 + number % 1000, 5, 6, 7]
                answer = pair.client.generate(prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
                return len(answer.ids)

            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                assert set(pool.map(ask, range(NUM_REQUESTS))) == {NUM_TOKENS}
        return {name: json.loads(pair.result_path(name).read_text()) for name in DAEMONS}


def report(name: str, rows: list[dict[str, Any]]) -> bool:
    """Print a daemon's figures; return whether the bounds hold."""
    steps = [row for row in rows if row["kind"] == "step"]
    watching = [row for row in rows if row["kind"] != "step"]
    step_ms = sum(row["thread_ms"] for row in steps)
    watching_ms = sum(row["thread_ms"] for row in watching)
    engines = {row["thread"] for row in steps}
    longest_ms = max((r["longest_ms"] for r in watching if r["thread"] in engines), default=0.0)
    share = watching_ms / step_ms
    num_steps = sum(row["calls"] for row in steps)
    print(
        f"{name}: {num_steps} steps of {step_ms / num_steps:.2f} ms; "
        f"{sum(row['calls'] for row in watching)} log and metric calls, "
        f"{share:.2%} of the steps' thread time (at most {MAX_SHARE:.0%}); longest on the engine "
        f"thread {longest_ms:.3f} ms (at most {MAX_ENGINE_CALL_MS:g})"
    )
    for row in watching:
        each_us = row["thread_ms"] / row["calls"] * 1000
        who = f"{row['kind']:<7}{row['thread']:<12}"
        print(
            f"  {who}{row['calls']:>7} calls, {each_us:6.1f} µs each, "
            f"longest {row['longest_ms']:.3f} ms"
        )
    return share <= MAX_SHARE and longest_ms <= MAX_ENGINE_CALL_MS


def main() -> int:
    """Measure once; 1 where a bound is missed."""
    model_file = fetch_model(MODEL, notify=lambda line: print(line, file=sys.stderr))
    results = measure(model_file, {"log.level": "debug"})
    are_met = [report(name, rows) for name, rows in results.items()]
    return 0 if all(are_met) else 1


if __name__ == "__main__":
    sys.exit(main())
