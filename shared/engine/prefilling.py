"""What every engine that computes prompts offers, and the one for the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shared.engine.collected import Collected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.engine.batch import SequenceStep
    from shared.engine.runner import ModelRunner


class Prefiller(Protocol):
    """An engine for prefill steps.  All calls come from the engine thread."""

    @property
    def depth(self) -> int:
        """Most steps that may be launched and not collected."""

    @property
    def num_in_flight(self) -> int:
        """Steps that are launched and not collected."""

    def launch(self, steps: Sequence[SequenceStep]) -> int | None:
        """Begin a step: a chunk of each of several prompts.

        Returns:
            The slot of the event that is done once the step's keys and values, and those of all
            earlier steps, are in the pool; None where they are there already.

        Raises:
            ValueError: A sequence does not fit the pool; nothing was launched.
        """

    def is_done(self) -> bool:
        """Whether the oldest step in flight is done."""

    def collect(self) -> Collected[int | None]:
        """Wait for the oldest step in flight.

        Returns:
            For each of its sequences, in order, the sampled token, or None where none was asked
            for.
        """


class EagerPrefiller:
    """Computes a step when it is launched: for the CPU, where nothing runs beside the host.

    Args:
        runner: The model over the pool.
    """

    depth = 1

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._sampled: tuple[int | None, ...] | None = None

    @property
    def num_in_flight(self) -> int:
        """See `Prefiller.num_in_flight`."""
        return int(self._sampled is not None)

    def launch(self, steps: Sequence[SequenceStep]) -> int | None:
        """Compute a step; see `Prefiller.launch`."""
        self._sampled = self._runner.execute(steps).token_ids
        return None

    def is_done(self) -> bool:
        """See `Prefiller.is_done`."""
        return self._sampled is not None

    def collect(self) -> Collected[int | None]:
        """See `Prefiller.collect`."""
        assert self._sampled is not None, "no step was launched"
        sampled, self._sampled = self._sampled, None
        return Collected(token_ids=sampled)
