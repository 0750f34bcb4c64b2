"""A daemon that is stopped past every deadline, and wakes up: it must harm nobody.

While decoded sleeps, prefilld gives its leases up, and after the quarantine the blocks go to other
requests, which is what poisons them: whatever decoded computed from them would be another answer.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.client import Client
from tests.support.exposition import Exposition
from tests.support.pair import wait_until
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tests.support.pair import DaemonName, Pair
    from tests.support.solo import SoloEngine

STOP_S = 10.0
PING_TIMEOUT_S = 2.0
QUARANTINE_S = 2.0
BLOCK_SIZE = 16
NUM_FILLERS = 4
LEFT_TOKENS = 2000
"""Of a prompt that is still being computed when its client leaves."""

STOP_SETTINGS: Mapping[str, object] = {
    "link.ping_interval_s": 0.25,
    "link.ping_timeout_s": PING_TIMEOUT_S,
    "link.quarantine_s": QUARANTINE_S,
}
"""Deadlines that a stop outlasts several times."""


def prompt_of(num_tokens: int, salt: int) -> tuple[int, ...]:
    """Return a prompt that no other salt's begins like."""
    return tuple(2 + (7 * index + salt) % 250 for index in range(num_tokens))


def pool(pair: Pair, key: str) -> int:
    """Return how many blocks of prefilld's pool are in a state."""
    return int(pair.status()["pool"][key])


def num_running(pair: Pair) -> int:
    """Return how many sequences decoded's batch has."""
    return int(pair.decoded_status()["sequences"]["running"])


def num_prefill_lost(pair: Pair) -> float:
    """Return how many adopted requests decoded ended because their blocks were taken back."""
    return pair.counter("decoded", 'kvpair_requests_failed_total{code="prefill-lost"}')


@contextmanager
def awake_again(pair: Pair, name: DaemonName) -> Iterator[None]:
    """Wake a daemon up at the end, also of a test that fails: its streams are waited for then."""
    try:
        yield
    finally:
        pair.signal(name, signal.SIGCONT)


@contextmanager
def streaming(pair: Pair, asks: Sequence[Ask]) -> Iterator[WatchedStreams]:
    """Ask, and wait until decoded streams every answer."""
    with WatchedStreams(pair.socket, asks) as streams:
        wait_until(lambda: num_running(pair) == len(asks), what="streams run")
        yield streams


def stop_in_mid_answer(pair: Pair, asks: Sequence[Ask]) -> WatchedStreams:
    """Ask, and stop decoded once each answer has two tokens, or some have more."""
    streams = WatchedStreams(pair.socket, asks)
    streams.wait_for_tokens(2 * len(asks))
    pair.signal("decoded", signal.SIGSTOP)
    return streams


def stop_in_mid_prompt(pair: Pair, asks: Sequence[Ask]) -> WatchedStreams:
    """Ask, and stop decoded while it pulls chunks of prompts that are being computed.

    The client of one of them leaves, so that only decoded may still have its blocks.
    """
    before = num_chunks(pair)
    leaver = Client(pair.socket, timeout_s=60)
    with leaver.stream(prompt_of(LEFT_TOKENS, salt=90), max_tokens=1):
        streams = WatchedStreams(pair.socket, asks)
        wait_until(lambda: num_chunks(pair) > before + 2, what="chunks are under way")
        pair.signal("decoded", signal.SIGSTOP)
    return streams


def num_chunks(pair: Pair) -> float:
    """Return how many chunks prefilld has announced, ever."""
    return pair.counter("prefilld", "kvpair_chunks_announced_total")


def check_sleeping_decoded(
    pair: Pair,
    engine: SoloEngine,
    *,
    running: Sequence[Ask],
    late: Sequence[Ask],
    stop: Callable[[Pair], WatchedStreams],
    loses_adopted: bool = True,
) -> None:
    """Stop decoded under load until its blocks are others', and wake it up.

    Args:
        pair: Under `STOP_SETTINGS`.
        engine: What answers each request alone.
        running: Streams that run before.
        late: What `stop` asks.
        stop: Asks for more and stops decoded at the worst moment; returns the streams.
        loses_adopted: Whether that is a moment at which it uses what it has adopted.
    """
    lost = num_prefill_lost(pair)
    with streaming(pair, running) as first, stop(pair) as second:
        with awake_again(pair, "decoded"):
            wake_s = time.monotonic() + STOP_S
            wait_until(
                lambda: pool(pair, "quarantined") > 0,
                timeout_s=PING_TIMEOUT_S + 2,
                what="the silent peer is given up",
            )
            assert _quarantine_gauge(pair) > 0
            wait_until(
                lambda: pool(pair, "quarantined") == 0,
                timeout_s=QUARANTINE_S + 2,
                what="the quarantine is over",
            )
            overwrite_free_blocks(pair)
            wait_until(lambda: time.monotonic() >= wake_s, timeout_s=STOP_S, what="it is time")
        engine.check_delivered(late, second.results())
        engine.check_delivered(running, first.results())
    if loses_adopted:
        assert num_prefill_lost(pair) > lost, "nothing was read when it stopped"
    check_serves(pair)


def check_sleeping_prefilld(
    pair: Pair, engine: SoloEngine, *, running: Sequence[Ask], late: Sequence[Ask]
) -> None:
    """Stop prefilld while it computes, until decoded has given it up, and wake it up.

    Args:
        pair: Under `STOP_SETTINGS`.
        engine: What answers each request alone.
        running: Streams that run before, and go on.
        late: Prompts that are being computed.
    """
    epoch = pair.status()["epoch"]
    with streaming(pair, running) as first, WatchedStreams(pair.socket, late) as second:
        wait_until(lambda: pair.status()["queue"]["running"] > 0, what="a prompt is being computed")
        with awake_again(pair, "prefilld"):
            pair.signal("prefilld", signal.SIGSTOP)
            wake_s = time.monotonic() + STOP_S
            engine.check_delivered(running, first.results())
            wait_until(
                lambda: pair.state("decoded") == "waiting-for-peer",
                timeout_s=PING_TIMEOUT_S + 5,
                what="decoded gives its silent peer up",
            )
            wait_until(lambda: time.monotonic() >= wake_s, timeout_s=STOP_S, what="it is time")
        engine.check_delivered(late, second.results())
        assert not any(delivered.losses for delivered in second.results()), "nobody asks again"
    assert pair.status()["epoch"] == epoch
    check_serves(pair)


def overwrite_free_blocks(pair: Pair) -> None:
    """Give every block of prefilld's pool that nobody has to another request, which fills it."""
    share = (pool(pair, "free") + pool(pair, "cached")) // NUM_FILLERS
    fillers = [
        Ask(prompt=prompt_of(share * BLOCK_SIZE, 200 + n), max_tokens=1) for n in range(NUM_FILLERS)
    ]
    with WatchedStreams(pair.socket, fillers) as streams:  # prefilld answers them by itself
        streams.results()


def check_serves(pair: Pair) -> None:
    """Fail unless the pair comes back, has every block, and answers."""
    pair.wait_serving()
    pair.wait_settled(timeout_s=1)
    assert len(pair.client.generate([5, 6], max_tokens=3, ignore_eos=True).ids) == 3


def _quarantine_gauge(pair: Pair) -> float:
    """Return what METRICS tells of the blocks in quarantine."""
    return Exposition(pair.client.metrics()).by_label("kvpair_pool_blocks", "state")["quarantined"]
