"""Sequences that grow, make room, come back and end in any order: the books always add up."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoded.scheduler import Scheduler
from decoded.swap_book import BlockSwap
from shared.kv.allocator import BlockAllocator
from tests.unit.decoded.batches import FakeSequence

NUM_BLOCKS = 12
NUM_PLACES = 8
MAX_BATCH = 5
BLOCK_SIZE = 2
DEPTH = 2


class Preemption(RuleBasedStateMachine):
    """A pool and an arena that are too small, and an engine of which two steps may be in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.arena = BlockAllocator(NUM_BLOCKS + 1), BlockAllocator(NUM_PLACES + 1)
        self.scheduler: Scheduler[FakeSequence] = Scheduler(
            allocator=self.pool, max_batch=MAX_BATCH, arena=self.arena
        )
        self.scheduler.on_left = self.on_left
        self.reserved: list[list[int]] = []
        self.living: list[FakeSequence] = []
        self.left: set[FakeSequence] = set()
        self.in_flight: list[list[FakeSequence]] = []
        self.copies: list[BlockSwap[FakeSequence]] = []
        self.moving_out: list[tuple[FakeSequence, list[int]]] = []
        self.contents: dict[tuple[str, int], tuple[FakeSequence, int]] = {}
        """What is in each block of the pool and the arena: whose, and which of its blocks."""

    def on_left(self, sequence: FakeSequence) -> None:
        assert sequence not in self.left
        assert not sequence.num_in_flight
        assert all(copy.sequence is not sequence for copy in self.copies)
        self.left.add(sequence)
        for each, places in [each for each in self.moving_out if each[0] is sequence]:
            self.moving_out.remove((each, places))
            self.scheduler.free_places(places)

    # --- what happens ---

    @rule(num_blocks=st.integers(1, 6))
    def reserve(self, num_blocks: int) -> None:
        blocks = self.scheduler.reserve(num_blocks)
        if blocks is not None:
            self.reserved.append(blocks)

    @precondition(lambda self: self.reserved)
    @rule(is_started=st.booleans(), answer=st.integers(1, 10))
    def settle(self, *, is_started: bool, answer: int) -> None:
        blocks = self.reserved.pop(0)
        if not is_started:
            self.scheduler.unreserve(blocks)
            return
        num_tokens = len(blocks) * BLOCK_SIZE - 1
        most = min(num_tokens + answer, NUM_BLOCKS * BLOCK_SIZE)
        sequence = FakeSequence(blocks, num_tokens, max_tokens=most, block_size=BLOCK_SIZE)
        self.living.append(sequence)
        self.scheduler.start(sequence)
        for number, block in enumerate(blocks):
            self.contents["pool", block] = sequence, number

    @precondition(lambda self: len(self.in_flight) < DEPTH)
    @rule()
    def launch(self) -> None:
        batch = self.scheduler.next_batch()
        for sequence in batch:
            position = sequence.num_tokens + sequence.num_in_flight
            number = position // BLOCK_SIZE
            assert number < len(sequence.blocks), "the step's token has a place"
            for known in range(number):
                assert self.contents["pool", sequence.blocks[known]] == (sequence, known)
            self.contents["pool", sequence.blocks[number]] = sequence, number
        if batch:
            self.scheduler.launched(batch)
            self.in_flight.append(batch)
        for sequence in self.scheduler.dropped:
            self.end(sequence)

    @precondition(lambda self: self.in_flight)
    @rule()
    def collect(self) -> None:
        batch = self.in_flight.pop(0)
        self.scheduler.collected(batch)
        for sequence in batch:
            sequence.num_tokens += 1
            if sequence in self.living and sequence.num_tokens == sequence.max_tokens:
                self.end(sequence)

    @rule(max_blocks=st.integers(0, 4))
    def begin_copies(self, max_blocks: int) -> None:
        copies = self.scheduler.next_swaps(max_blocks)
        assert sum(len(copy.sources) for copy in copies) <= max_blocks
        self.copies += copies

    @precondition(lambda self: self.copies)
    @rule(index=st.integers(0, 3))
    def end_copy(self, index: int) -> None:
        copy = self.copies.pop(index % len(self.copies))
        here, there = ("pool", "arena") if copy.is_out else ("arena", "pool")
        for source, target in zip(copy.sources, copy.targets, strict=True):
            if (here, source) in self.contents:  # else nothing was ever written there
                self.contents[there, target] = self.contents[here, source]
        self.scheduler.swap_done(copy)

    @precondition(lambda self: self.living)
    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        self.end(self.living[index % len(self.living)])

    @precondition(lambda self: self.living)
    @rule(index=st.integers(0, 9))
    def hold(self, index: int) -> None:
        """What it reads elsewhere is to go to the arena; here there is nothing of it."""
        sequence = self.living[index % len(self.living)]
        if any(each is sequence for each, _ in self.moving_out):
            return
        places = self.scheduler.move_out(sequence, 0)
        if places is not None:
            self.moving_out.append((sequence, places))

    @precondition(lambda self: self.moving_out)
    @rule()
    def let_go(self) -> None:
        """The copy is over; of a sequence that has ended meanwhile, nothing comes of it."""
        if self.moving_out[0][0] in self.living:
            self.scheduler.moved_out(*self.moving_out.pop(0))

    def end(self, sequence: FakeSequence) -> None:
        self.living.remove(sequence)
        self.scheduler.finish(sequence)

    # --- what holds ---

    @invariant()
    def blocks_add_up(self) -> None:
        self.pool.check_integrity()
        self.arena.check_integrity()
        named = [block for blocks in self.reserved for block in blocks]
        named += [block for sequence in self.living for block in sequence.blocks]
        assert len(set(named)) == len(named), "no block is in two hands"
        assert len(named) <= NUM_BLOCKS - self.pool.num_free

    @invariant()
    def places_in_the_batch_add_up(self) -> None:
        room = self.scheduler.room
        assert room.free_sequences >= 0
        swapped = self.scheduler.swapped
        assert not swapped or room.free_blocks == 0

    def teardown(self) -> None:
        """Whatever is left comes to its end, and then every block and place is free."""
        for sequence, places in [each for each in self.moving_out if each[0] in self.living]:
            self.moving_out.remove((sequence, places))
            self.scheduler.moved_out(sequence, places)
        for blocks in self.reserved:
            self.scheduler.unreserve(blocks)
        self.reserved = []
        for _ in range(2_000):
            while self.copies:
                self.end_copy(0)
            while self.in_flight:
                self.collect()
            if not self.living:
                break
            self.launch()
            self.begin_copies(4)
        assert not self.living, "somebody waits for ever"
        assert self.pool.num_free == NUM_BLOCKS
        assert self.arena.num_free == NUM_PLACES


TestPreemption = Preemption.TestCase
