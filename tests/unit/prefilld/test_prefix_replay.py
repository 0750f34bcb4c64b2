"""Traces replayed through the scheduler and the books of blocks: what is reused is what LRU reuses.

No forward pass: a chunk that is launched is computed.  The public traces tell each request's blocks
by an id of its whole prefix, and their page tells what an LRU cache of N blocks reuses of them.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefilld.scheduler import Scheduler
from shared.kv.allocator import BlockAllocator
from shared.kv.block_hashes import block_hashes
from shared.kv.holds import BlockHolds, Hold

REPOSITORY = Path(__file__).parents[3]
TRACES = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))

TRACE_BLOCK_TOKENS = 512
"""Tokens of the original requests that one id of a trace stands for."""

ROUNDING = 0.05 + 1e-9
"""The tables tell percentages with one digit."""

NUM_BLOCKS = (488, 976, 1_953, 3_906, 7_812, 15_625, 100_000)
"""Sizes of the tables; the last one holds either trace as a whole."""

TABLES = {
    "mooncake_conversation_first2000.jsonl": (3.8, 4.1, 4.9, 9.1, 18.0, 25.2, 29.4),
    "mooncake_synthetic_last1000.jsonl": (10.2, 19.9, 31.5, 46.7, 64.4, 68.8, 68.8),
}
"""Reused share of the input tokens in per cent, for each size."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    num_tokens: int
    prefix_ids: list[int]
    """One for each of its blocks; the last block may be partly filled."""


@dataclass(eq=False, slots=True)
class Prompt:
    """A row as the scheduler sees it: a token for each block, and one that is always computed."""

    token_ids: list[int]
    launched_tokens: int = 0
    hold: Hold | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Replay:
    """A pool whose blocks hold one token, so that a token stands for a block of the trace.

    Args:
        num_blocks: What the cache may keep; the pool has one more, for the token that no hit
            covers.
    """

    def __init__(self, num_blocks: int) -> None:
        allocator = BlockAllocator(num_blocks + 2)
        self.holds = BlockHolds(allocator, block_size=1)
        self._scheduler: Scheduler[Prompt] = Scheduler(
            token_budget=512, max_waiting=1, max_running=1
        )

    def play(self, rows: list[Row]) -> list[int]:
        """Serve one request after the other; return how many blocks each found."""
        return [self._serve(row) for row in rows]

    def _serve(self, row: Row) -> int:
        prompt = Prompt([*row.prefix_ids, 0])
        self._scheduler.add(prompt)
        assert self._scheduler.admit(self._take) is prompt
        assert prompt.hold is not None
        while chunks := self._scheduler.next_step():
            (chunk,) = chunks
            prompt.launched_tokens += chunk.length
            # The last token stands for no block of the trace, so it is not to be kept.
            self.holds.computed(prompt.hold, min(prompt.launched_tokens, len(row.prefix_ids)))
        self._scheduler.remove(prompt)
        self.holds.drop(prompt.hold)
        return prompt.hold.cached_tokens

    def _take(self, prompt: Prompt) -> bool:
        hashes = block_hashes(prompt.token_ids, block_size=1, root=b"")
        prompt.hold = self.holds.take(prompt.num_tokens, hashes)
        if prompt.hold is None:
            return False
        prompt.launched_tokens = prompt.hold.cached_tokens
        return True


def plain_lru(rows: list[Row], num_blocks: int) -> list[int]:
    """Return how many blocks each request finds in the plainest LRU cache of prefix ids.

    A request uses its blocks from its last one to its first, so ends go before beginnings.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for row in rows:
        num_known = 0
        while num_known < len(row.prefix_ids) and row.prefix_ids[num_known] in cache:
            num_known += 1
        found.append(num_known)
        for prefix_id in reversed(row.prefix_ids):
            cache[prefix_id] = None
            cache.move_to_end(prefix_id)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return found


def reused_percent(rows: list[Row], found: list[int]) -> float:
    """Return the share of the input tokens that did not have to be computed."""
    reused = sum(
        min(num_blocks * TRACE_BLOCK_TOKENS, row.num_tokens)
        for row, num_blocks in zip(rows, found, strict=True)
    )
    return 100 * reused / sum(row.num_tokens for row in rows)


def read_trace(name: str) -> list[Row]:
    lines = (TRACES / name).read_text().splitlines()
    return [Row(line["input_length"], line["hash_ids"]) for line in map(json.loads, lines)]


def small_trace() -> list[Row]:
    """Two documents and a system prompt that all begin with, in an order made by hand."""
    chains = [[1, 2, 3], [1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 4, 6], [1, 2, 3]]
    return [Row(3 * TRACE_BLOCK_TOKENS, chain) for chain in chains]


@pytest.mark.parametrize(
    ("num_blocks", "found"),
    [
        # Three blocks: each document drives the other out, the common beginning stays.
        (3, [0, 3, 1, 1, 1, 1]),
        # One more keeps the middle of the document before.
        (4, [0, 3, 1, 2, 2, 2]),
        # Five keep both documents whole, until block 6 drives 5 out: 3 was used after it.
        (5, [0, 3, 1, 3, 2, 3]),
        (6, [0, 3, 1, 3, 2, 3]),
    ],
)
def test_a_small_trace_is_reused_as_counted_by_hand(num_blocks: int, found: list[int]) -> None:
    """Ends are evicted before beginnings, and what was used last goes last."""
    assert Replay(num_blocks).play(small_trace()) == found
    assert plain_lru(small_trace(), num_blocks) == found


@pytest.mark.parametrize("index", range(len(NUM_BLOCKS)), ids=[str(size) for size in NUM_BLOCKS])
def test_a_trace_is_reused_as_its_lru_table_says(index: int) -> None:
    """Request by request what the plainest LRU cache finds, and in sum what the table tells.

    Where the public traces are not at hand, the small one stands in for them.
    """
    num_blocks = NUM_BLOCKS[index]
    traces = {name: read_trace(name) for name in TABLES if (TRACES / name).is_file()}
    for name, rows in (traces or {"small": small_trace()}).items():
        replay = Replay(num_blocks)
        found = replay.play(rows)
        assert found == plain_lru(rows, num_blocks)
        assert replay.holds.cache_use.hit_tokens == sum(found)
        replay.holds.check_integrity()
        if name in TABLES:
            told = TABLES[name][index]
            assert reused_percent(rows, found) == pytest.approx(told, abs=ROUNDING)
