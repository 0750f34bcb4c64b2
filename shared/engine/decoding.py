"""One decode step as the engine sees it, and what every engine that takes such steps offers.

A step may be launched before the one before it is done: then the token that it computes is not
known to the host yet, and the engine takes it from where the earlier step left it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shared.engine.batch import SequenceStep
from shared.engine.collected import Collected

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from shared.engine.history import TokenHistory
    from shared.engine.runner import ModelRunner
    from shared.ops.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """One sequence's part of a decode step: one token in, one token out."""

    key: Hashable
    """Which sequence; the same object from its first step to its last."""
    token_id: int | None
    """The token to compute; None for the one that this sequence's previous step samples."""
    position: int
    """Its place in the sequence: how many tokens were computed before."""
    block_table: Sequence[int]
    """The sequence's blocks in order.  `block` is one of the own pool, `~block` one of the peer's;
    the new token's own block is ours."""
    sampling: SamplingParams
    history: TokenHistory | None = None
    """What was said so far, where sampling looks at it or is to tell of it."""

    @property
    def context_len(self) -> int:
        """Tokens that are computed after this step, which is the sampled one's position."""
        return self.position + 1


class PreparedStep(Protocol):
    """A step of one sequence of which everything is ready but its token."""

    def rehearse(self) -> None:
        """Keep the way to the device warm: host and device both slow down while they only wait."""

    def launch(self, token_id: int) -> bool:
        """Begin it; False where it cannot any more, since another step was launched meanwhile."""


class Decoder(Protocol):
    """An engine for decode steps.  All calls come from the engine thread."""

    @property
    def depth(self) -> int:
        """Most steps that may be launched and not collected."""

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not collected."""

    def set_peer(self, kv: Tensor | None) -> None:
        """Let block tables name blocks of a peer's pool, or of none any more.

        With None, every step whose tables named one is collected, and none is launched again.
        """

    def launch(self, steps: Sequence[DecodeStep]) -> None:
        """Begin a step for a whole batch.

        Args:
            steps: The sequences, each at most once.  A sequence that is left out has ended: if it
                comes back, its token must be known.

        Raises:
            ValueError: A sequence does not fit the pool, or its token is not known.
        """

    def is_done(self) -> bool:
        """Whether the oldest step in flight is done."""

    def collect(self) -> Collected[int]:
        """Wait for the oldest step in flight and return what it sampled, in its steps' order."""


class PreparingDecoder(Decoder, Protocol):
    """One whose launches take a time worth saving."""

    def prepare(self, step: DecodeStep) -> PreparedStep:
        """Make a step ready that comes as soon as its token is known.

        Args:
            step: The only sequence of the next step, as for `launch`; its `token_id` says nothing.

        Raises:
            ValueError: A step is in flight, or the sequence does not fit the pool.
        """


class EagerDecoder:
    """Computes a step when it is launched: for the CPU, where nothing runs beside the host.

    Args:
        runner: The model over the own pool.
    """

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sampled: tuple[int, ...] | None = None

    @property
    def num_in_flight(self) -> int:
        """See `Decoder.num_in_flight`."""
        return int(self._sampled is not None)

    def set_peer(self, kv: Tensor | None) -> None:
        """See `Decoder.set_peer`."""
        self._runner.set_peer(kv)

    def launch(self, steps: Sequence[DecodeStep]) -> None:
        """Compute a step; see `Decoder.launch`."""
        result = self._runner.execute([_sequence_step(step) for step in steps])
        sampled = [token_id for token_id in result.token_ids if token_id is not None]
        assert len(sampled) == len(steps), "every decode step samples"
        self._sampled = tuple(sampled)

    def is_done(self) -> bool:
        """See `Decoder.is_done`."""
        return self._sampled is not None

    def collect(self) -> Collected[int]:
        """See `Decoder.collect`."""
        assert self._sampled is not None, "no step was launched"
        sampled, self._sampled = self._sampled, None
        return Collected(token_ids=sampled)


def _sequence_step(step: DecodeStep) -> SequenceStep:
    if step.token_id is None:
        raise ValueError("the token to compute is not known, and no earlier step is in flight")
    return SequenceStep(
        token_ids=(step.token_id,),
        start_position=step.position,
        block_table=step.block_table,
        sampling=step.sampling,
        history=step.history,
    )
