"""Room as decoded tells it and as prefilld believes it, whatever crosses whatever on the wire."""

from __future__ import annotations

from collections import deque

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from decoded.credits import is_outdated
from decoded.scheduler import Scheduler
from prefilld.credits import CreditAccount
from protocol import messages as wire
from shared.kv.allocator import BlockAllocator
from tests.unit.decoded.batches import FakeSequence

NUM_BLOCKS = 12
MAX_BATCH = 4


class Crossing(RuleBasedStateMachine):
    """Reservations go one way and words of room the other, each as late as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler[FakeSequence] = Scheduler(
            allocator=BlockAllocator(NUM_BLOCKS + 1), max_batch=MAX_BATCH
        )
        self.account = CreditAccount(most_blocks=NUM_BLOCKS)
        self.reservations: deque[tuple[int, bool]] = deque()
        """On their way: how many blocks, and whether the answer has to tell of room."""
        self.words: deque[wire.Credits] = deque()
        self.reserved: list[list[int]] = []
        self.seen = 0
        self.told = self.say()

    def say(self) -> wire.Credits:
        room = self.scheduler.room
        self.told = wire.Credits(
            free_blocks=room.free_blocks,
            free_sequences=room.free_sequences,
            queue_depth=0,
            seen=self.seen,
        )
        self.words.append(self.told)
        return self.told

    def say_if_outdated(self) -> None:
        told = self.told
        if not is_outdated(told, self.say()):
            self.words.pop()
            self.told = told

    # --- what happens ---

    @rule(num_blocks=st.integers(1, NUM_BLOCKS), is_answered=st.booleans())
    def send(self, num_blocks: int, *, is_answered: bool) -> None:
        """A HANDOFF is answered with a word of room, a CHUNK for which there is room is not."""
        if self.account.covers(num_blocks):
            self.account.spend(num_blocks)
            self.reservations.append((num_blocks, is_answered))

    @precondition(lambda self: self.reservations)
    @rule()
    def arrive(self) -> None:
        num_blocks, is_answered = self.reservations.popleft()
        self.seen += 1
        blocks = self.scheduler.reserve(num_blocks)
        assert blocks is not None, "what was promised is there, for nobody grew"
        self.reserved.append(blocks)
        if is_answered:
            self.say()
        else:
            self.say_if_outdated()

    @precondition(lambda self: self.reserved)
    @rule(index=st.integers(0, MAX_BATCH))
    def end(self, index: int) -> None:
        self.scheduler.unreserve(self.reserved.pop(index % len(self.reserved)))
        self.say()  # RELEASE

    @precondition(lambda self: self.words)
    @rule()
    def hear(self) -> None:
        word = self.words.popleft()
        self.account.update(
            free_blocks=word.free_blocks, free_sequences=word.free_sequences, seen=word.seen
        )

    # --- what holds ---

    @invariant()
    def growth_was_left_to_each(self) -> None:
        """Whoever was let in by a word finds a block to grow into, as do those before."""
        num_free = NUM_BLOCKS - sum(map(len, self.reserved))
        assert num_free >= len(self.reserved) - 1

    def teardown(self) -> None:
        """Once all have ended and every word was heard, the largest may come."""
        while self.reservations:
            self.arrive()
        while self.reserved:
            self.end(0)
        while self.words:
            self.hear()
        assert self.account.covers(NUM_BLOCKS), "nobody is let in though nothing runs"


TestCrossing = Crossing.TestCase
