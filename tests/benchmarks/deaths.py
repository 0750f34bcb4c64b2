"""Either daemon killed under load: who goes on, what comes back, and how soon.

Streams run and long prompts are being computed when a daemon gets SIGKILL.  Its successor is
started at that moment, beside the process that is being torn down, and started again where it says
that it lacks memory, as a supervisor does (`succession.py`).  No answer may be lost; every time is
told.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from shared.clock import NS_PER_MS, NS_PER_S
from tests.benchmarks.stream_clients import Ask, Clients, Heard
from tests.benchmarks.succession import Death
from tests.support.footprint import gpu_free_bytes
from tests.support.gpus import device_index
from tests.support.pair import Pair, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

Figures = dict[str, float]

GIB = 1 << 30

NUM_STREAMS = 16
BEGUN_TIMEOUT_S = 60.0

AFTER_DEATH_S = 2.0
"""How long after a death gaps between tokens are looked at: the mapping has gone by then."""

NEARLY_ALL = 0.9
"""Share of a pool's memory that, once free, shows it gone; others may take some meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What runs when a daemon dies."""

    model: str
    devices: tuple[str, str]
    vocab_size: int
    stream_tokens: int
    """Tokens of a stream's answer: long enough to outlast the death."""
    stream_prompt_tokens: int
    num_long: int
    """Long prompts that are sent while the streams run, with answers of two tokens."""
    long_prompt_tokens: int
    settings: Mapping[str, object] = field(default_factory=dict)
    """`section.key` to value, for the pair."""

    @property
    def is_on_gpus(self) -> bool:
        """Whether chunks come with events."""
        return device_index(self.devices[0]) is not None


def check_deaths(folder: Path, load: Load) -> Figures:
    """Kill prefilld, then decoded, each under load, and return what was seen.

    Args:
        folder: An empty folder.
        load: What runs meanwhile.

    Raises:
        AssertionError: An answer was lost, or a successor did not come to serve.
    """
    settings = {
        "prefilld.device": load.devices[0],
        "decoded.device": load.devices[1],
        "log.level": "debug",  # tells of each chunk
        "pool.access": "pull",
        **load.settings,
    }
    with (
        Pair(folder, model=load.model, settings=settings, start_timeout_s=300) as pair,
        Clients(pair.socket, vocab_size=load.vocab_size, num_processes=2) as streams,
        Clients(pair.socket, vocab_size=load.vocab_size, num_processes=1) as prompts,
    ):
        figures = _kill_prefilld(pair, _Running(pair, streams, prompts, load, seed=1))
        pair.wait_settled(timeout_s=10)
        figures |= _kill_decoded(pair, _Running(pair, streams, prompts, load, seed=2))
        pair.wait_settled(timeout_s=10)
    return figures


def _kill_prefilld(pair: Pair, running: _Running) -> Figures:
    load, pool = running.load, pair.status()["pool"]
    pool_bytes: int = pool["total"] * pool["block_bytes"]
    running.begin()
    free_bytes, mapped = gpu_free_bytes(load.devices[0]), _mapped_pools(pair)
    death = Death(pair, "prefilld")

    def is_unmapped() -> bool:
        if load.is_on_gpus:  # the driver keeps the memory until nobody maps it
            freed_bytes = gpu_free_bytes(load.devices[0]) - free_bytes
            return freed_bytes > NEARLY_ALL * pool_bytes
        return not mapped & _mapped_pools(pair)

    # The successor's weights take of what is free on a GPU, but its imports come first.
    wait_until(is_unmapped, timeout_s=10.0, what="decoded has unmapped the dead prefilld's pool")
    unmapped_s = _since_s(death.killed_ns)
    recovery = death.recovered()
    heard = running.results()
    assert pair.status()["pool"]["total"] == pool["total"], "the new pool is as large as the old"
    gaps_ms = running.gaps_ms(heard, death.killed_ns)
    return {
        "prefilld_killed_answers": float(len(heard)),
        "prefilld_killed_blocks_pending": float(running.num_pending(before_ns=death.killed_ns)),
        "prefilld_killed_itl_p50_ms": statistics.median(gaps_ms),
        "prefilld_killed_itl_max_ms": max(gaps_ms),
        "prefilld_killed_unmapped_s": unmapped_s,
        "prefilld_killed_pool_gib": pool_bytes / GIB,
        **recovery,
    }


def _kill_decoded(pair: Pair, running: _Running) -> Figures:
    num_lines = len(pair.log("prefilld"))
    running.begin()
    num_leased = pair.status()["pool"]["leased"]
    death = Death(pair, "decoded")
    _when(lambda: pair.status()["link"]["state"] != "open", "prefilld has lost its link")
    revoked_ns = _when(lambda: pair.status()["pool"]["leased"] == 0, "no block is leased")
    back_ns = _when(lambda: pair.status()["pool"]["quarantined"] == 0, "no block is in quarantine")
    recovery = death.recovered()
    heard = running.results()
    lost_ns = next(
        line["monotonic_ns"]
        for line in pair.log("prefilld")[num_lines:]
        if line["event"] == "link.lost"
    )
    return {
        "decoded_killed_answers": float(len(heard)),
        "decoded_killed_blocks_leased": float(num_leased),
        "decoded_killed_link_ended_ms": (lost_ns - death.killed_ns) / NS_PER_MS,
        "decoded_killed_leases_revoked_ms": (revoked_ns - lost_ns) / NS_PER_MS,
        "decoded_killed_leases_back_ms": (back_ns - lost_ns) / NS_PER_MS,
        **recovery,
    }


def _mapped_pools(pair: Pair) -> set[str]:
    """Return what tells the memfds of pools apart that decoded has mapped."""
    maps = Path(f"/proc/{pair.process('decoded').pid}/maps").read_text().splitlines()
    inodes = [line.split()[4] for line in maps if "memfd:kvpair-pool" in line]
    return set(inodes)


def _when(condition: Callable[[], bool], what: str) -> int:
    """Wait for something, and return when it was seen."""
    wait_until(condition, timeout_s=30.0, what=what)
    return time.monotonic_ns()


def _since_s(began_ns: int) -> float:
    return (time.monotonic_ns() - began_ns) / NS_PER_S


class _Running:
    """Streams, and long prompts that are computed beside them.

    Args:
        pair: Who serves them.
        streams: Clients for the streams.
        prompts: A client for the long prompts.
        load: How many and how long.
        seed: Another one makes other prompts.
    """

    def __init__(
        self, pair: Pair, streams: Clients, prompts: Clients, load: Load, *, seed: int
    ) -> None:
        self.load = load
        self._pair, self._streams, self._prompts = pair, streams, prompts
        self._first_seed = seed * 100_000
        self._first_line = len(pair.log("decoded"))
        self._futures: list[Future[list[Heard]]] = []

    def begin(self) -> None:
        """Return when all streams run and a chunk of a long prompt is announced and not pulled.

        On a CPU, where a chunk is announced when it is written, any chunk of one is enough.
        """
        load = self.load
        self._futures = self._streams.begin(
            [
                Ask(
                    num_prompt_tokens=load.stream_prompt_tokens,
                    num_tokens=load.stream_tokens,
                    seed=self._first_seed + number,
                )
                for number in range(NUM_STREAMS)
            ]
        )
        wait_until(
            lambda: self._pair.decoded_status()["sequences"]["running"] == NUM_STREAMS,
            timeout_s=BEGUN_TIMEOUT_S,
            what="all streams run",
        )
        first_line = len(self._pair.log("decoded"))
        self._futures += self._prompts.begin(
            [
                Ask(
                    num_prompt_tokens=load.long_prompt_tokens,
                    num_tokens=2,
                    seed=self._first_seed + NUM_STREAMS + number,
                )
                for number in range(load.num_long)
            ],
            lead_s=0.0,
        )

        def has_begun() -> bool:
            if load.is_on_gpus:
                return self.num_pending() > 0
            lines = self._pair.log("decoded")[first_line:]
            return any(line["event"] == "chunk.received" for line in lines)

        wait_until(has_begun, timeout_s=BEGUN_TIMEOUT_S, what="a long prompt is announced")

    def num_pending(self, *, before_ns: int | None = None) -> int:
        """Return how many announced blocks were not pulled, of prompts that are still prefilld's.

        Args:
            before_ns: Up to which moment decoded's log is believed; None for now.
        """
        pending: dict[int, int] = {}
        for line in self._pair.log("decoded")[self._first_line :]:
            if before_ns is not None and line["monotonic_ns"] > before_ns:
                break
            match line["event"]:
                case "chunk.received":
                    pending[line["lease_id"]] = (
                        pending.get(line["lease_id"], 0) + line["num_blocks"]
                    )
                case "chunk.pulled":
                    if line["lease_id"] in pending:
                        pending[line["lease_id"]] -= line["num_blocks"]
                case "handoff.adopted":
                    pending.pop(line["lease_id"], None)
        return sum(pending.values())

    def results(self) -> list[Heard]:
        """Wait for every answer, and fail unless all are whole."""
        heard = [each for future in self._futures for each in future.result(timeout=300)]
        assert not [each.failure for each in heard if each.failure]
        lengths = [self.load.stream_tokens] * NUM_STREAMS + [2] * self.load.num_long
        assert sorted(len(each.token_ns) for each in heard) == sorted(lengths)
        return heard

    def gaps_ms(self, heard: Sequence[Heard], death_ns: int) -> list[float]:
        """Return the gaps between the streams' tokens in the time after a death."""
        end_ns = death_ns + int(AFTER_DEATH_S * NS_PER_S)
        streams = [each for each in heard if len(each.token_ns) > 2]
        assert all(each.token_ns[-1] > end_ns for each in streams), "streams are too short"
        return [
            (later - earlier) / NS_PER_MS
            for each in streams
            for earlier, later in pairwise(each.token_ns[1:])
            if later >= death_ns and earlier <= end_ns
        ]
