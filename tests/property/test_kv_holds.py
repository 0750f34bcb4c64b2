"""Requests that share, compute, lend and drop blocks at random, against a model of what they hold.

The model knows no hashes: it compares tokens.  It writes into every fresh block what its request
computes there, so whatever is shared, evicted or written wrongly shows as another prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.block_hashes import block_hashes
from shared.kv.holds import HOLD_MOVES, BlockHolds, Hold

BLOCK_SIZE = 2
NUM_BLOCKS = 9
STRENGTH = (BlockState.QUARANTINED, BlockState.LEASED, BlockState.ACTIVE)

Prefix = tuple[int, ...]


@dataclass(eq=False)
class Sequence:
    """A request's tokens and its hold on their blocks."""

    tokens: Prefix
    hold: Hold
    num_computed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_computed = self.hold.cached_tokens

    def prefix(self, index: int) -> Prefix:
        """Return what the first `index + 1` blocks hold."""
        return self.tokens[: (index + 1) * BLOCK_SIZE]


class HoldsMachine(RuleBasedStateMachine):
    """One pool; tokens are 0 or 1, so prompts often begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.holds = BlockHolds(self.allocator, block_size=BLOCK_SIZE)
        self.sequences: list[Sequence] = []
        self.contents: dict[int, Prefix] = {}
        """What was computed into each block."""
        self.listed: dict[Prefix, int] = {}
        self.line: list[Prefix] = []
        """Listed prefixes that nobody holds, the least recently used first."""

    def holders(self, block: int) -> list[Sequence]:
        """Return the sequences that hold a block."""
        return [each for each in self.sequences if block in each.hold.blocks]

    def known(self, tokens: Prefix) -> list[Prefix]:
        """Return the prefixes that a prompt of these tokens should share."""
        found: list[Prefix] = []
        for end in range(BLOCK_SIZE, len(tokens), BLOCK_SIZE):  # its last token is not shared
            if tokens[:end] not in self.listed:
                break
            found.append(tokens[:end])
        return found

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple))
    def take(self, tokens: Prefix) -> None:
        """A prompt gets what is known of it and fresh blocks for the rest, or nothing at all."""
        known = self.known(tokens)
        num_fresh = -(-len(tokens) // BLOCK_SIZE) - len(known)
        evictable = [prefix for prefix in self.line if prefix not in known]
        num_free = self.allocator.num_free
        hashes = block_hashes(tokens, block_size=BLOCK_SIZE, root=b"")
        assert self.holds.cached_tokens(len(tokens), hashes) == len(known) * BLOCK_SIZE
        before = self.allocator.counts()
        hold = self.holds.take(len(tokens), hashes)
        if hold is None:
            assert num_fresh > num_free + len(evictable)
            assert self.allocator.counts() == before
            return
        assert num_fresh <= num_free + len(evictable)
        assert hold.cached_tokens == len(known) * BLOCK_SIZE
        shared, fresh = hold.blocks[: len(known)], hold.blocks[len(known) :]
        assert [self.contents[block] for block in shared] == known
        assert not any(self.holders(block) for block in fresh), "taken away from a holder"
        for prefix in evictable[: max(0, num_fresh - num_free)]:
            del self.listed[prefix]
            self.line.remove(prefix)
        assert not set(fresh) & set(self.listed.values()), "evicted out of turn"
        self.line = [prefix for prefix in self.line if prefix not in known]
        for block in fresh:
            self.contents.pop(block, None)
        self.sequences.append(Sequence(tokens, hold))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        """The next tokens of a prompt are computed, into blocks that nobody else holds."""
        each = data.draw(st.sampled_from(self.sequences))
        start, each.num_computed = (
            each.num_computed,
            min(each.num_computed + num_tokens, len(each.tokens)),
        )
        for index in range(start // BLOCK_SIZE, -(-each.num_computed // BLOCK_SIZE)):
            block = each.hold.blocks[index]
            if start < each.num_computed:
                assert self.holders(block) == [each], "a shared block is written"
            if each.num_computed < (index + 1) * BLOCK_SIZE:
                continue
            prefix = each.prefix(index)
            self.contents[block] = prefix
            if prefix in self.line:
                self.line.remove(prefix)
                self.line.append(prefix)
            self.listed.setdefault(prefix, block)
        self.holds.computed(each.hold, each.num_computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """A lease is opened, comes back or is quarantined."""
        hold = data.draw(st.sampled_from(self.sequences)).hold
        assert hold.state is not None
        targets = sorted(HOLD_MOVES[hold.state], key=lambda state: state.value)
        if targets:
            self.holds.move(hold, data.draw(st.sampled_from(targets)))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A request is over; what it computed is kept where nobody else has it."""
        each = data.draw(st.sampled_from(self.sequences))
        self.end(each)

    def end(self, each: Sequence) -> None:
        """Drop a sequence's hold."""
        self.sequences.remove(each)
        self.holds.drop(each.hold)
        for block in reversed(each.hold.blocks):
            prefix = self.contents.get(block)
            if prefix is not None and self.listed.get(prefix) == block and not self.holders(block):
                self.line.append(prefix)

    @invariant()
    def the_blocks_add_up(self) -> None:
        """Each block is in one state, the strongest of its holders'."""
        self.holds.check_integrity()
        counts = self.allocator.counts()
        parts = (counts.free, counts.cached, counts.active, counts.leased, counts.quarantined)
        assert sum(parts) + counts.reserved == counts.total == NUM_BLOCKS
        for block in range(1, NUM_BLOCKS):
            states = {each.hold.state for each in self.holders(block)}
            idle = BlockState.CACHED if block in self.listed.values() else BlockState.FREE
            expected = next((state for state in STRENGTH if state in states), idle)
            assert self.allocator.state(block) is expected

    @invariant()
    def every_holder_reads_its_own_prefix(self) -> None:
        """Nothing that was computed is written over while somebody holds it, lent or not."""
        for each in self.sequences:
            for index in range(each.num_computed // BLOCK_SIZE):
                assert self.contents[each.hold.blocks[index]] == each.prefix(index)

    def teardown(self) -> None:
        """Once all is over, every block is free or cache, and all of them can be had again."""
        while self.sequences:
            self.end(self.sequences[0])
        counts = self.allocator.counts()
        assert counts.free + counts.cached == NUM_BLOCKS - 1
        assert counts.cached == self.holds.cache_use.blocks == len(self.listed) == len(self.line)
        assert self.holds.take((NUM_BLOCKS - 1) * BLOCK_SIZE) is not None


TestHolds = HoldsMachine.TestCase
TestHolds.settings = settings(
    max_examples=200, stateful_step_count=60, derandomize=True, deadline=None
)
