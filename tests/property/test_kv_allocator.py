"""Random sequences of calls to the block allocator against the plainest model of it."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.kv.allocator import LEGAL_MOVES, BlockAllocator, BlockState
from shared.kv.errors import MisuseError, OutOfBlocksError

NUM_BLOCKS = 9
BLOCK_LISTS = st.lists(st.integers(-1, NUM_BLOCKS), max_size=5)


class AllocatorMachine(RuleBasedStateMachine):
    """The model is a dict from block to state."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.model = dict.fromkeys(range(NUM_BLOCKS), BlockState.FREE)
        self.model[0] = BlockState.RESERVED

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        """Blocks come out of the free ones, or none does."""
        free = {block for block, state in self.model.items() if state is BlockState.FREE}
        try:
            blocks = self.allocator.allocate(num_blocks)
        except OutOfBlocksError:
            assert num_blocks > len(free)
            return
        assert len(set(blocks)) == num_blocks
        assert set(blocks) <= free
        self.model.update(dict.fromkeys(blocks, BlockState.ACTIVE))

    @rule(blocks=BLOCK_LISTS, to=st.sampled_from(BlockState))
    def move(self, blocks: list[int], to: BlockState) -> None:
        """All of the blocks move, or none does."""
        is_legal = len(set(blocks)) == len(blocks) and all(
            block in self.model and to in LEGAL_MOVES[self.model[block]] for block in blocks
        )
        try:
            self.allocator.move(blocks, to)
        except MisuseError:
            assert not is_legal
            return
        assert is_legal
        self.model.update(dict.fromkeys(blocks, to))

    @invariant()
    def the_books_agree(self) -> None:
        """Every block is where the model has it, and the counts add up."""
        self.allocator.check_integrity()
        assert {block: self.allocator.state(block) for block in self.model} == self.model
        counts = self.allocator.counts()
        assert (
            counts.total == NUM_BLOCKS == sum(getattr(counts, state.value) for state in BlockState)
        )
        assert counts.free == self.allocator.num_free


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=100, derandomize=True, deadline=None)
