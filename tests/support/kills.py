"""Both daemons killed again and again under eight streams, and how long everything takes."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.messages import Sampling
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from tests.support.solo import SoloEngine

NUM_STREAMS = 8
SETTLED_S = 1.0
"""How soon after a death, and after the last answer, every block is accounted for."""


def asks_of(num_tokens: int) -> list[Ask]:
    """Return short and long prompts; greedy, drawn by chance from a seed, and with penalties.

    Args:
        num_tokens: Of each answer.
    """
    return [
        Ask(
            prompt=tuple(2 + (7 * index + number) % 250 for index in range(20 + 60 * number)),
            max_tokens=num_tokens,
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
            if s
        )


def check_kills(
    pair: Pair,
    engine: SoloEngine,
    recovery: Recovery,
    *,
    seed: int,
    num_rounds: int,
    asks: list[Ask],
) -> None:
    """Kill both daemons in each round, at random moments between the first and the last token.

    Once a round: a request that saw decoded die twice would be taken for the cause.

    Args:
        pair: Serving, and so at the end.
        engine: What answers each request alone.
        recovery: Where times are noted.
        asks: What is asked in each round, all at once.
        seed: Of the moments.
        num_rounds: How often both are killed.
    """
    chance = random.Random(seed)
    num_tokens = sum(ask.max_tokens for ask in asks)
    for _ in range(num_rounds):
        # Squared, since most is in flight at the beginning.
        kills = sorted((chance.random() ** 2, name) for name in DAEMONS)
        killed_s: dict[DaemonName, float] = {}
        with WatchedStreams(pair.socket, asks) as streams:
            for moment, name in kills:
                streams.wait_for_tokens(int(moment * 0.95 * num_tokens))
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
        engine.check_delivered(asks, results)
        recovery.stalls_s += [stall_s for delivered in results for stall_s in delivered.stalls_s]


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
