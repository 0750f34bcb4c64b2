"""A request while it is decoded's: its state from HANDOFF, and what has been generated since."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.daemon.sampling import sampling_params, wire_logprob
from shared.engine.decoding import DecodeStep
from shared.engine.history import TokenHistory
from shared.model.answer import AnswerAssembler, Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from decoded.early_step import EarlyStep
    from decoded.stream import ClientStream
    from protocol.messages import Handoff, RequestState, TokenLogprob
    from shared.ops.sampling import SamplingParams


@dataclass(slots=True)
class HandoffTimes:
    """When each stage was reached, on CLOCK_MONOTONIC in ns; 0 where it was not yet."""

    sent_ns: int = 0
    adopted_ns: int = 0
    copy_start_ns: int = 0
    copy_done_ns: int = 0
    first_step_ns: int = 0
    pull_device_ns: int | None = None
    """How long the copies took the GPU, in sum, by its clock; None where no GPU copied."""
    last_pull_device_ns: int | None = None
    """How long the last of them did."""
    first_step_device_ns: int | None = None
    """How long the first step did; None on a CPU, or where there was none."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One adopted request.  Compared by identity."""

    state: RequestState
    """As HANDOFF told it."""
    num_tokens: int
    """Tokens whose KV came with it."""
    stream: ClientStream
    assembler: AnswerAssembler
    sampling: SamplingParams
    times: HandoffTimes
    lease_id: int
    block_size: int
    """Tokens in a block."""
    slot: int = 0
    generation: int = 0
    """Of the lease: as long as the slot holds it, what is read in place is the prompt."""
    history: TokenHistory | None = None
    """What sampling depends on beside the logits, where it does."""
    held_logprobs: deque[TokenLogprob] = field(default_factory=deque)
    """Of the ids that have not left to the client, where the request asked."""
    in_place: list[int] = field(default_factory=list)
    """Blocks of the peer's pool that hold its beginning and are read where they are."""
    blocks: list[int] = field(default_factory=list)
    """Of decoded's own pool, what follows those; empty until they are pulled, and while it is
    swapped out."""
    block_table: list[int] = field(default_factory=list)
    """What it reads and writes, in order: `~block` for each of `in_place`, then `blocks`.
    Replaced, never changed: engines tell tables apart by identity."""
    num_slots: int = 0
    """Tokens that the table has places for."""
    has_started: bool = False
    """It was in the batch: its blocks are the scheduler's business, and no lease's."""
    has_ended: bool = False
    """Its client was told the end; a step in flight may still read and write its blocks."""
    is_moving: bool = False
    """What is read in place is being copied to blocks of our own pool."""
    preempted_ns: int = 0
    """When it had to make room for others; 0 where it has not, or is back."""
    new_ids: list[int] = field(default_factory=list)
    """Sampled here, beside what `state.ids` brought."""
    early: EarlyStep | None = None
    """Its first step, where that was launched before it came; the engine knows it by that."""
    num_in_flight: int = 0
    """Steps that are launched and not collected; `Scheduler` counts them."""
    is_cancelled: bool = False
    """Its client does not want it any more; it leaves before the next step."""

    @classmethod
    def adopt(
        cls,
        handoff: Handoff,
        *,
        stream: ClientStream,
        token_bytes: Callable[[int], bytes],
        block_size: int,
        adopted_ns: int,
    ) -> tuple[Sequence, Piece]:
        """Build the sequence that a HANDOFF describes, and what its client may be sent at once."""
        state = handoff.request
        assembler = AnswerAssembler(
            token_bytes,
            max_tokens=state.max_tokens,
            min_tokens=state.min_tokens,
            stop_ids=frozenset(state.stop_ids),
            stop_strings=state.stop,
        )
        piece = assembler.replay(state.ids, num_delivered=state.delivered)
        times = HandoffTimes(sent_ns=handoff.sent_ns, adopted_ns=adopted_ns)
        sampling = sampling_params(
            state.sampling, min_tokens=state.min_tokens, end_ids=state.stop_ids
        )
        sequence = cls(
            state=state,
            num_tokens=handoff.num_tokens,
            stream=stream,
            assembler=assembler,
            sampling=sampling,
            times=times,
            lease_id=handoff.lease,
            block_size=block_size,
            slot=handoff.slot,
            generation=handoff.generation,
            history=TokenHistory.needed_for(
                sampling,
                num_logprobs=state.logprobs,
                prompt=state.prompt_set,
                answer_ids=state.ids,
            ),
            held_logprobs=deque(state.held_logprobs),
        )
        return sequence, piece

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return len(self.state.ids) + len(self.new_ids)

    @property
    def adopted_ns(self) -> int:
        """When it was adopted: who is older goes first."""
        return self.times.adopted_ns

    @property
    def wants_step(self) -> bool:
        """Whether the answer may have tokens beyond those that steps in flight will bring."""
        return self.completion_tokens + self.num_in_flight < self.state.max_tokens

    @property
    def next_position(self) -> int:
        """Where the token of the next step will be: behind all that is computed by then."""
        return self.num_tokens + len(self.new_ids) + self.num_in_flight

    @property
    def lacks_slot(self) -> bool:
        """Whether the token of the next step has no place in the blocks."""
        return self.next_position >= self.num_slots

    def next_step(self) -> DecodeStep:
        """Return the step that computes the last sampled token and samples the next one."""
        last_id = self.new_ids[-1] if self.new_ids else self.state.ids[-1]
        return DecodeStep(
            key=self.early or self,
            token_id=None if self.num_in_flight else last_id,
            position=self.next_position,
            block_table=self.block_table,
            sampling=self.sampling,
            history=self.history,
        )

    def settle(self, blocks: list[int], in_place: list[int]) -> None:
        """Take our own blocks, behind those of the peer's pool that are read in place."""
        self.blocks, self.in_place = blocks, in_place
        self.block_table = [*(~block for block in in_place), *blocks]
        self.num_slots = len(self.block_table) * self.block_size

    def extend(self, block: int) -> None:
        """Have one more block of our own behind all others."""
        self.blocks = [*self.blocks, block]
        self.block_table = [*self.block_table, block]
        self.num_slots += self.block_size

    def go_on_from(self, early: EarlyStep) -> None:
        """Begin with a step that was launched before, over the blocks that were settled."""
        self.early, self.block_table = early, early.block_table

    def move_in(self, blocks: list[int]) -> None:
        """Read from now on from blocks of our own what was read in place."""
        self.settle([*blocks, *self.blocks], [])

    def vacate(self) -> list[int]:
        """Have no blocks of our own any more; return those that there were."""
        blocks = self.blocks
        self.settle([], self.in_place)
        return blocks

    def move_back(self, blocks: list[int]) -> None:
        """Have these blocks of our own from now on."""
        self.settle(blocks, self.in_place)

    def push(self, token_id: int) -> Piece:
        """Take the token that a step sampled."""
        self.new_ids.append(token_id)
        if self.history is not None and self.history.logprobs:
            self.held_logprobs.append(wire_logprob(self.history.logprobs.popleft()))
        return self.assembler.push(token_id)

    def take_logprobs(self, piece: Piece) -> list[TokenLogprob] | None:
        """Return what the request asked to be told of a piece's ids, which are the oldest held."""
        if self.state.logprobs is None:
            return None
        return [self.held_logprobs.popleft() for _ in piece.ids]
