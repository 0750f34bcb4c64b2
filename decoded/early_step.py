"""A sequence's first step, begun before its HANDOFF came.

decoded knows of a prompt's last blocks by a CHUNK, some milliseconds before they are written, and
of the first token by the control page, as soon as prefilld's engine does.  So where nothing else is
decoded, the engine thread begins the first step by itself, the moment that the blocks are pulled
and the token is there; HANDOFF takes its way through two event loops meanwhile and finds the step
under way.  Whatever ends the lease before (an ABORT, since the first token ended the answer; a lost
link) lets the step run to its end, and nobody looks at what it sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shared.engine.decoding import DecodeStep

if TYPE_CHECKING:
    from decoded.step_result import StepResult
    from shared.ops.sampling import SamplingParams


@dataclass(eq=False, slots=True, kw_only=True)
class EarlyStep:
    """One lease's, and one sequence's once that has started.  Compared by identity.

    The event loop's thread has it but for two things: from `was_offered` on the engine thread
    reads it, and writes `token_id` before it reports the copy that the step came with.
    """

    position: int
    """Of the first token: how many tokens the prompt has."""
    sampling: SamplingParams
    block_table: list[int] = field(default_factory=list)
    """The sequence's: blocks that are read in place, as `~block`, and those that were reserved."""
    was_offered: bool = False
    """The engine was asked to take it, behind the lease's last copy."""
    token_id: int | None = None
    """The first token, once the step was launched."""
    is_in_flight: bool = False
    """The step is launched and not collected, as far as the event loop knows."""
    result: StepResult | None = None
    """What the step brought, once it was collected; it may be before its sequence has started."""

    @property
    def is_launched(self) -> bool:
        """Whether the engine began it; it may be over."""
        return self.token_id is not None

    def has_begun_otherwise(self, first_token: int | None) -> bool:
        """Whether it was launched, and with another token than the one that HANDOFF tells."""
        return self.token_id not in (None, first_token)

    def contradicts(self, num_tokens: int, first_token: int | None) -> bool:
        """Whether HANDOFF tells of another prompt or another first token."""
        return num_tokens != self.position or self.has_begun_otherwise(first_token)

    def step(self) -> DecodeStep:
        """Return the step, as the engine prepares it."""
        return DecodeStep(
            key=self,
            token_id=None,
            position=self.position,
            block_table=self.block_table,
            sampling=self.sampling,
        )
