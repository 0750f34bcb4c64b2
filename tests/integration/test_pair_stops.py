"""A daemon that is stopped past every deadline, and wakes up: it must harm nobody.

While decoded sleeps, prefilld gives its leases up, and after the quarantine the blocks go to other
requests.  When it wakes up it is in the middle of copying them.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from shared.engine.local import LocalEngine
from shared.ops.sampling import SamplingParams
from tests.support.exposition import Exposition
from tests.support.link_peers import load_host
from tests.support.margin_rule import check_repeated
from tests.support.pair import DaemonName, Pair, wait_until
from tests.support.tiny_gguf import TinyGguf, context_of
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_LAYERS = 24
"""Enough that copying a prompt takes a while: 24 KiB a token."""
STOP_S = 10.0
PING_TIMEOUT_S = 2.0
QUARANTINE_S = 2.0
MAX_TRIES = 5
POOL_BLOCKS = 300
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of many layers."""
    gguf = TinyGguf(num_layers=NUM_LAYERS, metadata=context_of(4096))
    return gguf.write(tmp_path_factory.mktemp("deep") / "deep.gguf")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pair]:
    """Prompts in one chunk and none of it cached: all of it is copied behind its HANDOFF."""
    settings = {
        "pool.prefix_cache": False,
        "link.ping_interval_s": 0.25,
        "link.ping_timeout_s": PING_TIMEOUT_S,
        "link.quarantine_s": QUARANTINE_S,
        "prefilld.token_budget": 4096,
        "pool.num_blocks": POOL_BLOCKS,
        "decoded.num_blocks": 600,
    }
    with Pair(tmp_path_factory.mktemp("s"), model=model, settings=settings) as running:
        yield running


def prompt_of(num_tokens: int, salt: int) -> tuple[int, ...]:
    return tuple(2 + (7 * index + salt) % 250 for index in range(num_tokens))


RUNNING = [Ask(prompt=prompt_of(30, 10 * n), max_tokens=100) for n in range(4)]
LONG = [Ask(prompt=prompt_of(480, 100 + n), max_tokens=12) for n in range(8)]
"""Computed in one step and so handed over at once: 92 MB to copy, between steps of the others."""


class Solos:
    """What each request is answered when it runs alone."""

    def __init__(self, pair: Pair, engine: LocalEngine) -> None:
        self._engine = engine
        self._ids: dict[tuple[int, ...], list[int]] = {}
        for ask in (*RUNNING, *LONG):
            with WatchedStreams(pair.socket, [ask]) as alone:
                (delivered,) = alone.results()
            self._ids[ask.prompt] = delivered.ids
        pair.wait_settled()

    def check(self, streams: WatchedStreams) -> None:
        """Wait for answers, and check that each is whole and the one that it gets alone."""
        for ask, delivered in zip(streams.asks, streams.results(), strict=True):
            assert delivered.end is not None
            check_repeated(
                delivered.ids,
                self._ids[ask.prompt],
                prompt_ids=ask.prompt,
                sampling=SamplingParams(),
                logits_of=self._engine.prompt_logits,
            )


@pytest.fixture(scope="module")
def solos(pair: Pair, model: Path) -> Solos:
    """The answers of an undisturbed pair; one process judges where a choice was close."""
    model_ = load_host(model).model
    return Solos(
        pair,
        LocalEngine(model_, num_blocks=POOL_BLOCKS, block_size=BLOCK_SIZE, token_budget=4096),
    )


def pool(pair: Pair, key: str) -> int:
    return int(pair.status()["pool"][key])


def quarantine_gauge(pair: Pair) -> float:
    """Return what METRICS tells of the blocks in quarantine."""
    return Exposition(pair.client.metrics()).by_label("kvpair_pool_blocks", "state")["quarantined"]


@contextmanager
def awake_again(pair: Pair, name: DaemonName) -> Iterator[None]:
    """Wake a daemon up at the end, also of a test that fails: its streams are waited for then."""
    try:
        yield
    finally:
        pair.signal(name, signal.SIGCONT)


def num_prefill_lost(pair: Pair) -> float:
    """Return how many adopted requests decoded ended because their blocks were taken back."""
    return pair.counter("decoded", 'kvpair_requests_failed_total{code="prefill-lost"}')


def num_running(pair: Pair) -> int:
    return int(pair.decoded_status()["sequences"]["running"])


def num_unpulled(pair: Pair) -> int:
    """Return how many requests decoded had adopted and not pulled, as of its last log line."""
    events = [line["event"] for line in pair.log("decoded")]
    return events.count("handoff.adopted") - events.count("lease.pulled")


def stop_in_mid_copy(pair: Pair) -> WatchedStreams:
    """Ask for the long prompts and stop decoded while it copies them; return their streams."""
    for _ in range(MAX_TRIES):
        streams = WatchedStreams(pair.socket, LONG)
        wait_until(
            lambda: pair.decoded_status()["sequences"]["waiting"] > 0,
            timeout_s=30,
            what="decoded has adopted a prompt and is copying it",
        )
        pair.signal("decoded", signal.SIGSTOP)
        if num_unpulled(pair) > 0:
            return streams
        pair.signal("decoded", signal.SIGCONT)
        with streams:
            streams.results()
    raise AssertionError(f"decoded copied faster than it could be stopped, {MAX_TRIES} times")


def overwrite_free_blocks(pair: Pair) -> None:
    """Give every block of prefilld's pool that nobody has to another request, which fills it."""
    num_tokens = (pool(pair, "free") + pool(pair, "cached")) * BLOCK_SIZE
    share = num_tokens // 4
    fillers = [Ask(prompt=prompt_of(share, 200 + n), max_tokens=1) for n in range(4)]
    with WatchedStreams(pair.socket, fillers) as streams:  # prefilld answers them by itself
        streams.results()


def test_a_decoded_that_sleeps_over_its_leases_uses_none_of_their_blocks(
    pair: Pair, solos: Solos
) -> None:
    """Its copies are void; their requests are computed anew, and nobody sees more than a pause."""
    lost = num_prefill_lost(pair)
    with WatchedStreams(pair.socket, RUNNING) as running:
        wait_until(lambda: num_running(pair) == len(RUNNING), what="streams run")
        with stop_in_mid_copy(pair) as long:
            with awake_again(pair, "decoded"):
                wake_s = time.monotonic() + STOP_S
                wait_until(
                    lambda: pool(pair, "quarantined") > 0,
                    timeout_s=PING_TIMEOUT_S + 2,
                    what="the silent peer is given up",
                )
                assert quarantine_gauge(pair) > 0
                wait_until(
                    lambda: pool(pair, "quarantined") == 0,
                    timeout_s=QUARANTINE_S + 2,
                    what="the quarantine is over",
                )
                overwrite_free_blocks(pair)
                wait_until(lambda: time.monotonic() >= wake_s, timeout_s=STOP_S, what="it is time")
            solos.check(long)
        solos.check(running)
    assert num_prefill_lost(pair) > lost, "nothing was being copied"
    pair.wait_serving()
    pair.wait_settled(timeout_s=1)
    assert len(pair.client.generate([5, 6], max_tokens=3, ignore_eos=True).ids) == 3


def test_a_prefilld_that_sleeps_holds_up_only_what_it_computes(pair: Pair, solos: Solos) -> None:
    epoch = pair.status()["epoch"]
    with WatchedStreams(pair.socket, RUNNING) as running:
        wait_until(lambda: num_running(pair) == len(RUNNING), what="streams run")
        with WatchedStreams(pair.socket, LONG) as long:
            wait_until(
                lambda: pair.status()["queue"]["running"] > 0, what="a prompt is being computed"
            )
            with awake_again(pair, "prefilld"):
                pair.signal("prefilld", signal.SIGSTOP)
                wake_s = time.monotonic() + STOP_S
                solos.check(running)
                wait_until(
                    lambda: pair.state("decoded") == "waiting-for-peer",
                    timeout_s=PING_TIMEOUT_S + 5,
                    what="decoded gives its silent peer up",
                )
                wait_until(lambda: time.monotonic() >= wake_s, timeout_s=STOP_S, what="it is time")
            solos.check(long)
            assert not any(delivered.losses for delivered in long.results()), "nobody asks again"
    pair.wait_serving()
    pair.wait_settled(timeout_s=1)
    assert pair.status()["epoch"] == epoch
    assert len(pair.client.generate([5, 6], max_tokens=3, ignore_eos=True).ids) == 3
