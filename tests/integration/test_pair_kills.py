"""Both daemons killed again and again under eight streams: every answer is the one it would be."""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.messages import Sampling
from shared.engine.local import LocalEngine
from shared.ops.sampling import SamplingParams
from tests.support.margin_rule import check_repeated
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.daemon.model_host import ModelHost
    from tests.support.watched_streams import Delivered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_SEEDS, NUM_ROUNDS = 2, 5
"""Over both ways of access in all 20 kills of each daemon."""
NUM_STREAMS = 8
NUM_TOKENS = 150
SETTLED_S = 1.0
"""How soon after a death, and after the last answer, every block is accounted for."""


def asks() -> list[Ask]:
    """Return short and long prompts; greedy, drawn by chance from a seed, and with penalties."""
    return [
        Ask(
            prompt=tuple(2 + (7 * index + number) % 250 for index in range(20 + 60 * number)),
            max_tokens=NUM_TOKENS,
            sampling=Sampling(
                temperature=0.9 * (number % 2),
                seed=number,
                repetition_penalty=1.3 if number > 5 else 1.0,
                frequency_penalty=0.5 if number > 5 else 0.0,
            ),
        )
        for number in range(NUM_STREAMS)
    ]


@dataclass(slots=True)
class Recovery:
    """How long everything took, in seconds."""

    serving_s: dict[DaemonName, list[float]] = field(
        default_factory=lambda: {name: [] for name in DAEMONS}
    )
    """From a kill until the pair serves again."""
    stalls_s: list[float] = field(default_factory=list)
    """From a stream's loss to its next token."""

    def report(self) -> str:
        """Return one line a figure."""
        figures = {
            **{f"{name} killed, until the pair serves": s for name, s in self.serving_s.items()},
            "a stream's loss, until its next token": self.stalls_s,
        }
        return "".join(
            f"\n{what}: median {statistics.median(s):.2f} s, longest {max(s):.2f} s of {len(s)}"
            for what, s in figures.items()
        )


@pytest.fixture(scope="module", params=["pull", "direct"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[Pair]:
    """Chunks of 64 tokens, so that kills also fall between two of them."""
    settings = {
        "prefilld.token_budget": 64,
        "log.level": "info",
        "pool.access": request.param,
    }
    with Pair(tmp_path_factory.mktemp("k"), model=tiny_model, settings=settings) as running:
        yield running


def is_accounted_for(pair: Pair, dead: DaemonName) -> bool:
    """Whether the survivor has got back whatever only the dead one could have used."""
    if dead == "decoded":
        if pair.state("prefilld") in (None, "loading"):
            return True  # it was killed as well, and its pool with it
        pool = pair.status()["pool"]
        return bool(pool["leased"] == pool["quarantined"] == 0)
    if pair.state("decoded") in (None, "loading"):
        return True
    return bool(pair.decoded_status()["sequences"]["waiting"] == 0)


def check(delivered: Delivered, solo: Delivered, ask: Ask, engine: LocalEngine) -> None:
    """Check that an answer is whole and the one that the request got alone."""
    assert delivered.end is not None
    assert (delivered.end.reason, delivered.end.usage.completion_tokens) == ("length", NUM_TOKENS)
    sampling = ask.sampling
    # The lead is told without penalties, so an answer that has some must be equal to be passed.
    check_repeated(
        delivered.ids,
        solo.ids,
        prompt_ids=ask.prompt,
        sampling=SamplingParams(temperature=sampling.temperature, seed=sampling.seed or 0),
        logits_of=engine.prompt_logits,
    )
    if delivered.ids == solo.ids:
        assert delivered.text == solo.text


@pytest.fixture(scope="module")
def recovery(request: pytest.FixtureRequest) -> Iterator[Recovery]:
    """What the tests of this file measure; told at their end."""
    measured = Recovery()
    yield measured
    capture = request.config.pluginmanager.getplugin("capturemanager")
    if measured.stalls_s and capture is not None:
        with capture.global_and_fixture_disabled():
            print(measured.report(), file=sys.stderr)


@pytest.fixture(scope="module")
def solos(pair: Pair) -> list[Delivered]:
    """What each request is answered when it runs alone."""
    answers = []
    for ask in asks():
        with WatchedStreams(pair.socket, [ask]) as alone:
            answers += alone.results()
    return answers


@pytest.fixture(scope="module")
def engine(tiny_host: ModelHost) -> LocalEngine:
    """One process over the same weights: what a close choice is judged by."""
    return LocalEngine(tiny_host.model, num_blocks=256, block_size=16, token_budget=512)


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_kills_of_either_daemon_change_no_answer(
    pair: Pair, solos: list[Delivered], engine: LocalEngine, recovery: Recovery, seed: int
) -> None:
    """Each round kills both, at random moments between the first and the last of the tokens.

    Once a round: a request that saw decoded die twice would be taken for the cause.
    """
    chance = random.Random(seed)
    for _ in range(NUM_ROUNDS):
        # Squared, since most is in flight at the beginning.
        kills = sorted((chance.random() ** 2, name) for name in DAEMONS)
        killed_s: dict[DaemonName, float] = {}
        with WatchedStreams(pair.socket, asks()) as streams:
            for moment, name in kills:
                streams.wait_for_tokens(int(moment * 0.95 * NUM_STREAMS * NUM_TOKENS))
                pair.kill(name)
                killed_s[name] = time.monotonic()
                pair.start(name)
                wait_until(
                    lambda dead=name: is_accounted_for(pair, dead),
                    timeout_s=SETTLED_S,
                    what=f"the blocks add up after {name}'s death",
                )
            pair.wait_serving()
            for name, at_s in killed_s.items():
                recovery.serving_s[name].append(time.monotonic() - at_s)
            results = streams.results()
        pair.wait_settled(timeout_s=SETTLED_S)
        for delivered, solo, ask in zip(results, solos, asks(), strict=True):
            check(delivered, solo, ask, engine)
            recovery.stalls_s += delivered.stalls_s
