"""One soak from its first request to the last, and what must be true of it afterwards."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.support.exposition import Exposition
from tests.support.footprint import Footprint
from tests.support.pair import DAEMONS
from tests.support.soak import Soak
from tests.support.soak_plans import (
    LONGEST_ANSWER_TOKENS,
    LONGEST_PROMPT_TOKENS,
    Conduct,
    draw_plans,
)
from tests.support.solo import resume_of

if TYPE_CHECKING:
    from tests.support.pair import Pair
    from tests.support.soak import Outcome
    from tests.support.solo import SoloEngine

BLOCK_SIZE = 16
PROMPT_BLOCKS = -(-LONGEST_PROMPT_TOKENS // BLOCK_SIZE)
ANSWER_BLOCKS = -(-LONGEST_ANSWER_TOKENS // BLOCK_SIZE) + 1
"""And one that is shared with the prompt."""

CONCURRENCY = 16
"""Several times as many as the pools hold, so that most requests wait somewhere."""

MOST_CLOSE_CHOICES = 5
"""Answers that may differ from their solo run by the margin rule; 0 or 1 of 500 are seen."""

ENDINGS = ("stop", "length", "cancelled")


def soak_settings(access: str) -> dict[str, object]:
    """Return a pair's settings: crowded pools, prompts of several chunks, a queue full at times.

    Each pool has room for two of the largest requests, or about three of all kinds; decoded's own
    for one and a half where prompts are pulled, so that answers make room for each other.
    """
    own_blocks = (
        2 * ANSWER_BLOCKS if access == "direct" else 3 * (PROMPT_BLOCKS + ANSWER_BLOCKS) // 2
    )
    return {
        "pool.access": access,
        "pool.num_blocks": 1 + 2 * (PROMPT_BLOCKS + ANSWER_BLOCKS),
        "decoded.num_blocks": 1 + own_blocks,
        "prefilld.token_budget": 64,
        "prefilld.max_waiting": 10,
        "log.level": "info",
    }


class SoakRun:
    """Random requests, carried out.

    Args:
        pair: Fresh: its counters stand at 0.
        engine: What answers each request alone.
        seed: Of all that is random; told on stderr, where a failed test shows it.
        num_requests: How many there are.
        num_warmup: After so many of them the pair has what memory it needs.
        devices: prefilld's and decoded's.
    """

    def __init__(
        self,
        pair: Pair,
        engine: SoloEngine,
        *,
        seed: int,
        num_requests: int,
        num_warmup: int,
        devices: tuple[str, str] = ("cpu", "cpu"),
    ) -> None:
        print(f"the soak's seed is {seed}", file=sys.stderr)
        self.pair, self._engine, self._devices = pair, engine, devices
        plans = draw_plans(seed, num_requests)
        self._solos = {plan: engine.answer(plan) for plan in plans}
        fingerprint = pair.status()["fingerprint"]
        asks = [
            (plan, resume_of(plan, solo, fingerprint=fingerprint))
            for plan, solo in self._solos.items()
        ]
        Footprint.of(pair, devices)  # which itself takes some of a GPU's memory at its first look
        soak = Soak(pair, concurrency=CONCURRENCY)
        self.outcomes = soak.run(asks[:num_warmup])
        pair.wait_settled()
        self._before = Footprint.of(pair, devices)
        self.outcomes += soak.run(asks[num_warmup:])
        pair.wait_settled()

    # --- answers -----------------------------------------------------------------------------

    def check_answers(self) -> None:
        """Fail unless whatever a client was given is what its request is answered alone."""
        num_close = 0
        for outcome in self.outcomes:
            num_close += not self._is_equal(outcome)
        assert num_close <= MOST_CLOSE_CHOICES

    def _is_equal(self, outcome: Outcome) -> bool:
        plan, solo, end = outcome.plan, self._solos[outcome.plan], outcome.end
        is_whole = end is not None and end.reason != "cancelled"
        is_equal = self._engine.check_ids(plan, solo, outcome.ids, is_whole=is_whole)
        self._engine.check_logprobs(plan, solo, outcome.ids, outcome.logprobs)
        if is_equal:
            assert solo.text.startswith(outcome.text), plan.id
        if end is None:
            return is_equal
        assert end.usage.prompt_tokens == len(plan.prompt), plan.id
        num_told = len(solo.brought_ids) + len(outcome.ids)
        if not is_whole:  # ids whose text was not whole yet stay untold
            assert end.usage.completion_tokens >= num_told, plan.id
            return is_equal
        assert end.usage.completion_tokens == num_told, plan.id
        if is_equal:
            assert (outcome.text, end.reason) == (solo.text, solo.reason), plan.id
        return is_equal

    # --- counts and logs -----------------------------------------------------------------------

    def check_counts(self) -> None:
        """Fail unless both daemons together counted what the clients saw."""
        ended, failed = self._ended(), self._failed()
        num_accepted = self.pair.counter("prefilld", "kvpair_requests_accepted_total")
        assert sum(ended.values()) == num_accepted
        seen = Counter(outcome.end.reason for outcome in self.outcomes if outcome.end is not None)
        seen["busy"] = sum(outcome.num_busy for outcome in self.outcomes)
        # A client that left may have missed what it was told by a moment.
        num_silent = sum(outcome.end is None for outcome in self.outcomes)
        for reason, counted in [*((each, ended[each]) for each in ENDINGS), *failed.items()]:
            assert seen[reason] <= counted <= seen[reason] + num_silent, (reason, counted, seen)
        assert ended["gone"] <= num_silent
        assert sum(ended.values()) <= len(self.outcomes)

    def check_logs(self) -> None:
        """Fail unless each accepted request's end was told once, as its client saw it."""
        lines = [line for name in DAEMONS for line in self.pair.log(name)]
        ends: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if line["event"] == "request.ended":
                ends.setdefault(line["request_id"], []).append(line)
        accepted = {line["request_id"] for line in lines if line["event"] == "request.accepted"}
        assert accepted == set(ends)
        for outcome in self.outcomes:
            name = outcome.plan.id
            assert name in accepted or outcome.accepted is None, name
            assert len(ends.get(name, [])) <= 1, name
            for told in ends.get(name, []):
                if outcome.end is None:
                    assert told["reason"] in ("gone", *ENDINGS), told
                else:
                    seen = (outcome.end.reason, outcome.end.usage.completion_tokens)
                    assert (told["reason"], told["completion_tokens"]) == seen, name
        loud = [line for line in lines if line["level"] not in ("debug", "info")]
        assert not loud, loud[:3]

    # --- what is left ----------------------------------------------------------------------------

    def check_nothing_is_left(self) -> None:
        """Fail unless every gauge of something in use stands at 0, and every block is accounted."""
        for name, client in (("prefilld", self.pair.client), ("decoded", self.pair.decoded_client)):
            told = Exposition(client.metrics())
            in_use = {
                **told.by_label("kvpair_queue_requests", "queue"),
                **told.by_label("kvpair_reserved_slots", "use"),
                "unaccounted": told["kvpair_pool_unaccounted_blocks"],
            }
            blocks = told.by_label("kvpair_pool_blocks", "state")
            in_use |= {state: blocks[state] for state in ("active", "leased", "quarantined")}
            assert not any(in_use.values()), (name, in_use)
        sequences = self.pair.decoded_status()["sequences"]
        assert not any(sequences.values()), sequences

    def check_flat(self, *, growth_bytes: int, gpu_growth_bytes: int = 0) -> None:
        """Fail unless the pair takes no more of its machine than after the warm-up.

        Args:
            growth_bytes: How much a daemon's memory may have grown nevertheless.
            gpu_growth_bytes: The same of a GPU's memory that is in use.
        """
        after = Footprint.of(self.pair, self._devices)
        for name, now in after.processes.items():
            before = self._before.processes[name]
            assert now.num_descriptors <= before.num_descriptors, (name, before, now)
            assert now.num_threads <= before.num_threads, (name, before, now)
            grown_bytes = now.resident_bytes - before.resident_bytes
            assert grown_bytes <= growth_bytes, f"{name} has grown by {grown_bytes} bytes"
        assert after.gpu_growth_bytes(self._before) <= gpu_growth_bytes

    def check_pressure(self) -> None:
        """Fail unless the run was what it is meant to be: crowded, impatient, and answered."""
        conducts = Counter(outcome.plan.conduct for outcome in self.outcomes if outcome.left)
        assert set(conducts) == {each for each in Conduct if each.leaves}, conducts
        cache = self.pair.status()["prefix_cache"]
        assert cache["evicted_blocks"] > 0
        assert cache["hit_tokens"] > 0
        assert self.pair.counter("decoded", "kvpair_preemptions_total") > 0
        num_whole = sum(
            outcome.end is not None and outcome.end.reason != "cancelled"
            for outcome in self.outcomes
        )
        assert num_whole > len(self.outcomes) / 2

    def _ended(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for client in (self.pair.client, self.pair.decoded_client):
            told = Exposition(client.metrics())
            counted.update(told.by_label("kvpair_requests_ended_total", "reason"))
        return counted

    def _failed(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for client in (self.pair.client, self.pair.decoded_client):
            told = Exposition(client.metrics())
            counted.update(told.by_label("kvpair_requests_failed_total", "code"))
        return counted
