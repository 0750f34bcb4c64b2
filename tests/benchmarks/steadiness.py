"""A pair whose link is broken and whose daemons are restarted again and again: does anything grow?

A link is broken as in life where a daemon hangs: it is stopped (SIGSTOP) until the other has given
it up, and goes on afterwards.  The epoch stays: only the connection, the mapping and the events are
made anew.  After each break the pair serves some requests.
"""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from protocol.client import Client
from tests.support.footprint import Footprint
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Figures = dict[str, float]

MIB = 1 << 20

SETTINGS: Mapping[str, object] = {
    "link.ping_interval_s": 0.05,
    "link.ping_timeout_s": 0.2,  # how long a break takes; far above a pause of an idle daemon
    "log.level": "info",
    "pool.num_blocks": 400,
    "decoded.num_blocks": 400,
    "decoded.max_batch": 16,
    "prefilld.token_budget": 128,
    "pool.access": "pull",
}

NUM_AT_ONCE = 10
"""Requests after each break, all at once."""

LONGEST_PROMPT = 300
"""Tokens; three chunks."""

NUM_VOCABULARY = 250
"""Ids that every test model has."""


def break_link(pair: Pair, name: DaemonName) -> None:
    """Stop a daemon until the other has given it up, and wait until both are one pair again."""
    status = pair.decoded_status if name == "prefilld" else pair.status
    pair.signal(name, signal.SIGSTOP)
    try:
        wait_until(
            lambda: (status()["link"] or {}).get("state") != "open",
            what=f"the other daemon has given {name} up",
        )
    finally:
        pair.signal(name, signal.SIGCONT)
    pair.wait_serving()


def ask_many(pair: Pair, chance: random.Random) -> None:
    """Have a few requests of chance lengths answered, all at once."""

    def ask(prompt: list[int]) -> int:
        answer = Client(pair.socket, timeout_s=60).generate(prompt, max_tokens=8, ignore_eos=True)
        return len(answer.ids)

    prompts = [
        [chance.randrange(2, NUM_VOCABULARY) for _ in range(chance.randint(1, LONGEST_PROMPT))]
        for _ in range(NUM_AT_ONCE)
    ]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        assert list(pool.map(ask, prompts)) == [8] * NUM_AT_ONCE


def check_steadiness(
    folder: Path,
    *,
    model: Path,
    devices: tuple[str, str],
    num_cycles: int,
    num_restarts: int,
) -> Figures:
    """Break and restart a pair, and return what grew.

    Args:
        folder: An empty folder.
        model: What to serve: something small, since every restart loads it.
        devices: Prefilld's and decoded's.
        num_cycles: How often the link is broken, by stopping either daemon in turn.
        num_restarts: How often each daemon is restarted, killed every other time.

    Footprints are compared from a tenth of the cycles on, when everything was used once.
    """
    chance = random.Random(5)
    settings = {**SETTINGS, "prefilld.device": devices[0], "decoded.device": devices[1]}
    with Pair(folder, model=model, settings=settings, start_timeout_s=200) as pair:
        epoch = pair.status()["epoch"]
        num_warm = max(4, num_cycles // 10)
        began_s = time.monotonic()
        before: Footprint | None = None
        for number in range(num_cycles + num_warm):
            if number == num_warm:
                pair.wait_settled()
                before, began_s = Footprint.of(pair, devices), time.monotonic()
            break_link(pair, DAEMONS[number % 2])
            ask_many(pair, chance)
        cycle_s = (time.monotonic() - began_s) / num_cycles
        pair.wait_settled()
        after = Footprint.of(pair, devices)
        assert before is not None
        assert pair.status()["epoch"] == epoch, "every link was of one epoch"
        figures = {
            "cycles": float(num_cycles),
            "cycle_ms": cycle_s * 1e3,
            "cycle_requests": float(num_cycles * NUM_AT_ONCE),
            "cycles_gpu_growth_mib": after.gpu_growth_bytes(before) / MIB,
        }
        for name in DAEMONS:
            was, now = before.processes[name], after.processes[name]
            figures |= {
                f"cycles_{name}_more_descriptors": float(now.num_descriptors - was.num_descriptors),
                f"cycles_{name}_more_threads": float(now.num_threads - was.num_threads),
                f"cycles_{name}_rss_growth_mib": (now.resident_bytes - was.resident_bytes) / MIB,
            }
        figures |= _restart(pair, devices, num_restarts, chance)
    return figures


def _restart(
    pair: Pair, devices: tuple[str, str], num_restarts: int, chance: random.Random
) -> Figures:
    """Restart both daemons in turn, and return what is taken more at the end than at first."""
    before: Footprint | None = None
    longest_s = 0.0
    for number in range(num_restarts):
        for name in DAEMONS:
            began_s = time.monotonic()
            pair.signal(name, signal.SIGTERM if number % 2 else signal.SIGKILL)
            pair.process(name).wait(timeout=30)
            pair.restart(name)
            longest_s = max(longest_s, time.monotonic() - began_s)
        ask_many(pair, chance)
        pair.wait_settled()
        before = before or Footprint.of(pair, devices)
    if before is None:
        return {}
    after = Footprint.of(pair, devices)
    return {
        "restarts_each": float(num_restarts),
        "restart_longest_s": longest_s,
        "restarts_gpu_growth_mib": after.gpu_growth_bytes(before) / MIB,
    }
