"""A request while it is decoded's: its state from HANDOFF, and what has been generated since."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.daemon.sampling import sampling_params, wire_logprob
from shared.engine.batch import SequenceStep
from shared.engine.history import TokenHistory
from shared.model.answer import AnswerAssembler, Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from decoded.stream import ClientStream
    from protocol.messages import Handoff, RequestState
    from protocol.messages import TokenLogprob as WireLogprob
    from shared.ops.logprobs import TokenLogprob
    from shared.ops.sampling import SamplingParams


@dataclass(slots=True)
class HandoffTimes:
    """When each stage was reached, on CLOCK_MONOTONIC in ns; 0 where it was not yet."""

    sent_ns: int = 0
    adopted_ns: int = 0
    copy_start_ns: int = 0
    copy_done_ns: int = 0
    first_step_ns: int = 0


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
    history: TokenHistory | None = None
    """What sampling depends on beside the logits, where it does."""
    held_logprobs: deque[WireLogprob] = field(default_factory=deque)
    """Of the ids that have not left to the client, where the request asked."""
    blocks: list[int] = field(default_factory=list)
    """Of decoded's own pool, prompt first; empty until they are pulled."""
    new_ids: list[int] = field(default_factory=list)
    """Sampled here, beside what `state.ids` brought."""
    is_cancelled: bool = False
    """Its client does not want it any more; it leaves before the next step."""

    @classmethod
    def adopt(
        cls,
        handoff: Handoff,
        *,
        stream: ClientStream,
        token_bytes: Callable[[int], bytes],
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
            history=TokenHistory.needed_for(
                sampling, prompt=state.prompt_set, answer_ids=state.ids
            ),
            held_logprobs=deque(state.held_logprobs),
        )
        return sequence, piece

    @property
    def completion_tokens(self) -> int:
        """Tokens of the answer so far, resumed ones included."""
        return len(self.state.ids) + len(self.new_ids)

    def next_step(self) -> SequenceStep:
        """Return the step that computes the last sampled token and samples the next one."""
        last_id = self.new_ids[-1] if self.new_ids else self.state.ids[-1]
        return SequenceStep(
            token_ids=(last_id,),
            start_position=self.num_tokens + len(self.new_ids),
            block_table=self.blocks,
            sampling=self.sampling,
            history=self.history,
            num_logprobs=self.state.logprobs,
        )

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> Piece:
        """Take the token that a step sampled, and how likely it was, where that was asked for."""
        self.new_ids.append(token_id)
        if logprob is not None:
            self.held_logprobs.append(wire_logprob(logprob))
        return self.assembler.push(token_id)

    def take_logprobs(self, piece: Piece) -> list[WireLogprob] | None:
        """Return what the request asked to be told of a piece's ids, which are the oldest held."""
        if self.state.logprobs is None:
            return None
        return [self.held_logprobs.popleft() for _ in piece.ids]
