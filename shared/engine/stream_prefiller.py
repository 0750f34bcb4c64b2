"""Prefill steps on a GPU, enqueued on one stream ahead of the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.engine.collected import Collected

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.engine.choosing import Told
    from shared.engine.device_stream import DeviceStream
    from shared.engine.device_timing import Timing
    from shared.engine.prefill_graphs import PrefillGraphs
    from shared.engine.runner import ModelRunner

DEPTH = 2
"""The step that runs and the one behind it.  More would only make a new prompt wait longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    steps: Sequence[SequenceStep]
    sampled: Tensor
    """[num_sampled] int64 in host memory, filled once `timing` is passed."""
    told: Told | None
    """To be settled then."""
    timing: Timing


class StreamPrefiller:
    """See `shared.engine.prefilling.Prefiller`.

    Args:
        runner: The model over the pool.
        stream: Where steps are enqueued.
        record: Records an event of the ring on the stream of that handle and returns its slot.
        graphs: Computes short steps, on the same stream; the runner computes the others.
    """

    depth = DEPTH

    def __init__(
        self,
        runner: ModelRunner,
        stream: DeviceStream,
        record: Callable[[int], int],
        *,
        graphs: PrefillGraphs | None = None,
    ) -> None:
        self._runner, self._stream, self._record = runner, stream, record
        self._graphs = graphs
        self._in_flight: deque[_InFlight] = deque()

    @property
    def num_in_flight(self) -> int:
        """See `Prefiller.num_in_flight`."""
        return len(self._in_flight)

    def launch(self, steps: Sequence[SequenceStep]) -> int | None:
        """Enqueue a step; see `Prefiller.launch`."""
        slots: list[int] = []

        def written() -> None:
            # Recorded before the logits: decoded needs the blocks and not the token.
            slots.append(self._record(self._stream.handle))
            # Once more: an event that another process waits for tells no time.
            timing.split()

        graphs = self._graphs
        begin = graphs.begin if graphs and graphs.takes(steps) else self._runner.begin
        with self._stream.current():
            timing = self._stream.begin_timing()
            chosen = begin(steps, written)
            sampled = self._stream.to_host(chosen.token_ids)
            if chosen.told is not None:
                chosen.told.fetch(self._stream.to_host)
            timing.end()
            self._in_flight.append(
                _InFlight(steps=steps, sampled=sampled, told=chosen.told, timing=timing)
            )
        return slots[0]

    def is_done(self) -> bool:
        """See `Prefiller.is_done`."""
        return bool(self._in_flight) and self._in_flight[0].timing.is_passed()

    def collect(self) -> Collected[int | None]:
        """See `Prefiller.collect`."""
        oldest = self._in_flight.popleft()
        oldest.timing.wait()
        if oldest.told is not None:
            oldest.told.settle()
        return Collected(
            token_ids=self._runner.token_ids(oldest.steps, oldest.sampled),
            device_ns=oldest.timing.device_ns(),
            written_ns=oldest.timing.split_ns(),
        )
