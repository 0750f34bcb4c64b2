"""What `kvpair bench` asks: how many requests, how long, when.  Drawn from a seed; asks nobody.

A load is closed, where a number of clients each send their next request when the last is answered,
or open, where requests come at a rate whatever became of those before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

MAX_CONCURRENCY = 512
"""Connections that one process can hold where it may open 1,024 files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A number of tokens, or a range in which every number is as likely."""

    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"

    def draw(self, source: np.random.Generator, count: int) -> list[int]:
        """Return `count` numbers of it."""
        return [int(each) for each in source.integers(self.low, self.high + 1, size=count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a good answer keeps to; None where nothing is asked."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Of each gap between two tokens."""

    @property
    def is_asked(self) -> bool:
        """Whether anything is."""
        return self.ttft_ms is not None or self.itl_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of a pair."""

    num_requests: int
    concurrency: int | None
    """Requests at a time; None for as many as the rate makes."""
    rate: float | None
    """Requests a second, on average; None sends one as soon as another is answered."""
    prompt_tokens: Span
    answer_tokens: Span
    num_shared_tokens: int
    """With which all prompts begin alike."""
    seed: int
    """Of lengths and arrivals, so that two runs do the same work."""

    @property
    def max_at_once(self) -> int:
        """How many requests can run at the same time."""
        return min(self.concurrency or MAX_CONCURRENCY, self.num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    num_prompt_tokens: int
    num_tokens: int
    """Of its answer."""
    seed: int
    """Of the prompt's tokens; no two requests share one, or the prefix cache would answer."""
    start_s: float = 0.0
    """When it is due, after the run began."""
    num_shared_tokens: int = 0
    """How many of the prompt's tokens are those of `shared_seed`."""
    shared_seed: int = 0


def asks_of(load: Load, *, prompt_seed: int, first_number: int = 0) -> list[Ask]:
    """Return a load's requests in the order in which they are due.

    Args:
        load: What to ask.
        prompt_seed: Of what prompts share; those that follow are of what each has for itself.
            Whoever asks twice with one seed measures the prefix cache.
        first_number: The first request's.
    """
    import numpy as np  # noqa: PLC0415  not for `--help`

    source = np.random.default_rng(load.seed)
    lengths = load.prompt_tokens.draw(source, load.num_requests)
    answers = load.answer_tokens.draw(source, load.num_requests)
    starts_s = _arrivals_s(source, load)
    return [
        Ask(
            num_prompt_tokens=lengths[index],
            num_tokens=answers[index],
            seed=prompt_seed + 1 + first_number + index,
            start_s=starts_s[index],
            num_shared_tokens=load.num_shared_tokens,
            shared_seed=prompt_seed,
        )
        for index in range(load.num_requests)
    ]


def _arrivals_s(source: np.random.Generator, load: Load) -> list[float]:
    """Return when each request is due; as a Poisson process, where a rate is asked for.

    Times are stretched so that the last one is where the rate says: a short run would otherwise
    be off by what its draws happen to sum to.
    """
    if load.rate is None:
        return [0.0] * load.num_requests
    times = source.exponential(size=load.num_requests).cumsum()
    times *= load.num_requests / load.rate / times[-1]
    return [float(each) for each in times]
