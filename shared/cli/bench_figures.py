"""What a run's answers show, as figures.  Pure: what was heard goes in, numbers come out.

Names and meaning are those of vLLM's `bench serve`, where it has them; what is a hand-over's own
stands beside them.  Requests that failed are counted and left out of everything else; what was cut
tells its tokens, and no length of a whole answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from shared.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from shared.cli.bench_plan import Slo
    from shared.cli.bench_stream import Heard


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a quantity spreads over all that was observed, in its own unit."""

    num: int
    mean: float
    std: float
    """Of the population."""
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Return the spread of values, percentiles by linear interpolation; None without any."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        median, p90, p99 = (float(each) for each in np.percentile(array, (50, 90, 99)))
        return cls(
            num=int(array.size),
            mean=float(array.mean()),
            std=float(array.std()),
            median=median,
            p90=p90,
            p99=p99,
            max=float(array.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run shows; times in ms unless their names say otherwise."""

    num_completed: int
    num_cut: int
    num_resumptions: int
    """How often an answer broke off and was gone on with."""
    failures: dict[str, int]
    """How many requests failed, by code."""
    duration_s: float
    """From when the first request was due to the last token."""
    input_tokens: int
    """Of completed requests."""
    cached_tokens: int
    """How many of them were found in the prefix cache."""
    output_tokens: int
    max_concurrent_requests: int
    num_good: int | None
    """Completed requests that kept to the SLO; None where there was none."""
    ttft: Spread | None
    """From when a request was due to its first token."""
    gap: Spread | None
    """From the first token to the second."""
    handover: Spread | None
    """What of that the hand-over took: from when prefilld knew the first token to the second at the
    client, less the request's median step."""
    itl: Spread | None
    """Between two arrivals of tokens, from the second token on, of all requests."""
    itl_beside_prompts: Spread | None
    """Those during which prefilld computed a prompt of the run."""
    itl_alone: Spread | None
    """Those during which it did not."""
    tpot: Spread | None
    """Mean time per token after the first, of each answer."""
    e2el: Spread | None
    """From when a request was due to its last token."""
    send_lag: Spread | None
    """How much later than due requests were sent."""
    stages: dict[str, Spread]
    """Queue and prefill, and the hand-over's stages since prefilld knew the first token."""
    device: dict[str, Spread]
    """What of that GPUs took, by their own clocks."""

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return sum(self.failures.values())

    def a_second(self, number: float) -> float | None:
        """Return a number per second of the run; None where it had none."""
        return number / self.duration_s if self.duration_s > 0 else None


def figures_of(all_heard: Sequence[Heard], slo: Slo) -> Figures:
    """Return what a run's requests show."""
    heard = [each for each in all_heard if each.failure is None]
    whole = [each for each in heard if each.end is not None and each.token_ns]
    begun = [each for each in heard if each.token_ns]
    usages = [each.end.usage for each in whole if each.end is not None]
    beside, alone = _itls_ms(begun, _prefills_ns(whole))
    return Figures(
        num_completed=len(whole),
        num_cut=sum(each.is_cut for each in heard),
        num_resumptions=sum(each.num_resumptions for each in all_heard),
        failures=dict(Counter(each.failure.code for each in all_heard if each.failure)),
        duration_s=_duration_s(begun),
        input_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=sum(len(each.token_ns) for each in begun),
        max_concurrent_requests=_max_concurrent(begun),
        num_good=sum(_is_good(each, slo) for each in whole) if slo.is_asked else None,
        ttft=Spread.of(each.ttft_ms for each in begun),
        gap=Spread.of(each.gap_ms for each in begun if _has_gap(each)),
        handover=Spread.of(cost for each in whole if (cost := _handover_ms(each)) is not None),
        itl=Spread.of(chain(beside, alone)),
        itl_beside_prompts=Spread.of(beside),
        itl_alone=Spread.of(alone),
        tpot=Spread.of(_tpot_ms(each) for each in whole if len(each.token_ns) > 1),
        e2el=Spread.of((each.token_ns[-1] - each.due_ns) / NS_PER_MS for each in whole),
        send_lag=Spread.of((each.sent_ns - each.due_ns) / NS_PER_MS for each in heard),
        stages=_spreads(_stages_ms(each) for each in whole),
        device=_spreads(each.device_ms for each in whole),
    )


def _duration_s(begun: Sequence[Heard]) -> float:
    if not begun:
        return 0.0
    last_ns = max(each.token_ns[-1] for each in begun)
    return (last_ns - min(each.due_ns for each in begun)) / NS_PER_S


def _max_concurrent(begun: Sequence[Heard]) -> int:
    """Return how many requests ran at one moment, from when they were sent to their last token."""
    # At one moment ends come before beginnings: who waits for another's end is not beside it.
    edges = sorted(edge for each in begun for edge in ((each.sent_ns, 1), (each.token_ns[-1], -1)))
    return max((int(each) for each in np.cumsum([step for _, step in edges])), default=0)


def _has_gap(heard: Heard) -> bool:
    """Whether the second token came apart from the first.

    A token that ends within a character leaves with the next one, and then nobody sees the gap.
    """
    return len(heard.token_ns) > 1 and heard.token_ns[1] != heard.token_ns[0]


def _tpot_ms(heard: Heard) -> float:
    return (heard.token_ns[-1] - heard.token_ns[0]) / (len(heard.token_ns) - 1) / NS_PER_MS


def _arrivals_ns(heard: Heard) -> NDArray[np.int64]:
    """Return when tokens came from the second on, each moment once."""
    return np.unique(np.asarray(heard.token_ns[1:], dtype=np.int64))


def _handover_ms(heard: Heard) -> float | None:
    """Return what the hand-over took; None where not all that it takes was seen.

    Of an answer that was resumed the daemons tell the last hand-over, and no client saw that.
    """
    gaps_ns = np.diff(_arrivals_ns(heard))
    is_seen = heard.first_token_ns and _has_gap(heard) and gaps_ns.size
    if not is_seen or heard.num_resumptions:
        return None
    until_second_ns = heard.token_ns[1] - heard.first_token_ns
    return float(until_second_ns - np.median(gaps_ns)) / NS_PER_MS


def _is_good(heard: Heard, slo: Slo) -> bool:
    if slo.ttft_ms is not None and heard.ttft_ms > slo.ttft_ms:
        return False
    longest_ns = max(np.diff(np.asarray(heard.token_ns, dtype=np.int64)), default=0)
    return slo.itl_ms is None or longest_ns / NS_PER_MS <= slo.itl_ms


def _prefills_ns(whole: Sequence[Heard]) -> NDArray[np.int64]:
    """Return when prefilld computed prompts.

    Returns:
        [2, n] int64, beginnings and ends on CLOCK_MONOTONIC, in order and apart from each other.
    """
    merged: list[list[int]] = []
    for begin_ns, end_ns in sorted(_prefill_ns(each) for each in whole if each.first_token_ns):
        if merged and begin_ns <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end_ns)
        else:
            merged.append([begin_ns, end_ns])
    return np.asarray(merged, dtype=np.int64).reshape(-1, 2).T


def _prefill_ns(heard: Heard) -> tuple[int, int]:
    assert heard.end is not None
    timings = heard.end.timings_ms
    return timings.first_token_ns - round(timings.prefill * NS_PER_MS), timings.first_token_ns


def _itls_ms(
    begun: Sequence[Heard], prefills_ns: NDArray[np.int64]
) -> tuple[list[float], list[float]]:
    """Return gaps between tokens from the second on: beside a prompt's computation, and alone.

    An answer's own prompt is none of them: it was computed before the first token, unless the
    answer was resumed.
    """
    beside: list[float] = []
    alone: list[float] = []
    begins_ns, ends_ns = prefills_ns
    for each in begun:
        arrivals_ns = _arrivals_ns(each)
        earlier, later = arrivals_ns[:-1], arrivals_ns[1:]
        # Of computations that end after a gap began, the first decides: it began before the gap's
        # end, or all of them began later.
        first = np.searchsorted(ends_ns, earlier, side="right")
        is_beside = np.zeros(earlier.shape, dtype=bool)
        there = first < len(ends_ns)
        is_beside[there] = begins_ns[first[there]] < later[there]
        gaps_ms = (later - earlier) / NS_PER_MS
        beside += gaps_ms[is_beside].tolist()
        alone += gaps_ms[~is_beside].tolist()
    return beside, alone


def _stages_ms(heard: Heard) -> dict[str, float]:
    assert heard.end is not None
    timings = heard.end.timings_ms
    return {"queue": timings.queue, "prefill": timings.prefill, **heard.handoff_ms}


def _spreads(told: Iterable[dict[str, float]]) -> dict[str, Spread]:
    """Return the spread of each value over those that have it, in the order of their first."""
    values: dict[str, list[float]] = {}
    for each in told:
        for name, value in each.items():
            values.setdefault(name, []).append(value)
    spreads = {name: Spread.of(found) for name, found in values.items()}
    return {name: spread for name, spread in spreads.items() if spread is not None}
