"""A pair whose decoded has too little room for what it is asked, on any devices."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from protocol.messages import Sampling
from tests.support.pair import START_TIMEOUT_S, Pair
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.support.solo import SoloEngine
    from tests.support.watched_streams import Delivered

NUM_BLOCKS = 40
"""Of decoded's pool: three answers of the crowd fit it."""
NUM_TOKENS = 150
"""Of each answer: about twelve blocks of 16 with its prompt."""


def crowd(num_asks: int = 12) -> list[Ask]:
    """Return short and longer prompts; some drawn by chance from a seed, some with a penalty."""
    return [
        Ask(
            prompt=tuple(2 + (7 * index + 11 * number) % 250 for index in range(10 + 9 * number)),
            max_tokens=NUM_TOKENS,
            sampling=Sampling(
                temperature=1.5 * (number % 2),
                seed=number,
                repetition_penalty=1.3 if number % 3 == 0 else 1.0,
            ),
        )
        for number in range(num_asks)
    ]


@contextmanager
def small_pair(
    folder: Path,
    model: Path,
    *,
    devices: tuple[str, str] = ("cpu", "cpu"),
    start_timeout_s: float = START_TIMEOUT_S,
    **settings: object,
) -> Iterator[Pair]:
    """Run a pair whose decoded has little room; afterwards every block and place is back.

    Args:
        folder: An empty folder of a short path.
        model: The model file.
        devices: prefilld's and decoded's.
        start_timeout_s: For both to serve.
        settings: Over those of a small pair; `__` stands for the dot.
    """
    fixed: dict[str, object] = {
        "prefilld.device": devices[0],
        "decoded.device": devices[1],
        "decoded.num_blocks": NUM_BLOCKS,
        "decoded.max_batch": 16,
        "log.level": "info",
    }
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    with Pair(
        folder, model=model, settings=fixed | changes, start_timeout_s=start_timeout_s
    ) as pair:
        yield pair
        pair.wait_settled()
        status = pair.decoded_status()
        assert status["sequences"]["swapped"] == status["swap"]["used"] == 0


def ask_all(pair: Pair, engine: SoloEngine, asks: Sequence[Ask]) -> list[Delivered]:
    """Ask everything at once; check that each answer is whole and that of one process alone."""
    with WatchedStreams(pair.socket, asks) as streams:
        results = streams.results()
    engine.check_delivered(asks, results)
    assert pair.counter("decoded", "kvpair_preemptions_total") > 0
    return results


def ask_all_and_kill_prefilld(
    pair: Pair, engine: SoloEngine, asks: Sequence[Ask], *, after_tokens: int
) -> None:
    """Kill prefilld under answers that read its pool; nobody who was adopted has to ask again.

    Args:
        pair: With direct access.
        engine: Judges the answers.
        asks: As many as pool and arena hold together.
        after_tokens: How many tokens of each answer, on average, come before.
    """
    with WatchedStreams(pair.socket, asks) as streams:
        streams.wait_for_tokens(len(asks) * after_tokens)
        pair.kill("prefilld")
        pair.restart("prefilld")
        results = streams.results()
    engine.check_delivered(asks, results)
    lost = 'kvpair_requests_failed_total{code="prefill-lost"}'
    assert pair.counter("decoded", lost) == 0
    assert [loss for delivered in results for loss in delivered.losses] == []
