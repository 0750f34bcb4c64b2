"""Decode steps on a GPU: captured once for each batch size, launched ahead of the host.

What a step needs lies in buffers of fixed address (`decode_inputs.py`), and a row of them belongs
to one sequence for as long as it runs (`decode_rows.py`).  The token to compute comes from the
device itself: the step before left it in its row, and the host, which has not seen it yet, only
says which row that is.

Sizes.  A graph is captured for each of `batch_sizes`, and a batch runs in the smallest that holds
it; the rows beyond have no slot and no context and cost next to nothing.

The graph takes the likeliest token of every row; other choices come behind it (`graph_head.py`).

A step of one sequence may be made ready before its token is known (`prepare`): its inputs, its
graph, and the way of its token back are one graph of their own, and nothing else comes between.

Everything is enqueued on one stream, so a buffer that the host rewrites for the next step is read
by the present one first.  Only memory that the host itself writes needs more than one copy: it is
read when the GPU gets to it, up to `DEPTH` steps later.

Without a GPU the same steps run eagerly, which is how the tests on a CPU see them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from shared.engine.choosing import is_plain
from shared.engine.collected import Collected
from shared.engine.decode_inputs import TOKEN, DecodeInputs
from shared.engine.decode_rows import DecodeRows, RowPlan
from shared.engine.device_stream import DeviceStream
from shared.engine.graph_head import GraphHead
from shared.ops.sampler import warm_up_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.choosing import Told
    from shared.engine.decoding import DecodeStep
    from shared.engine.device_timing import Timing
    from shared.kv.layout import KVLayout
    from shared.model.llama import Llama
    from shared.ops.pool_pair import PoolPair

DEPTH = 2
"""The step that runs and the one behind it: the GPU never waits, and a token of a sequence that has
ended is computed at most once in vain."""


def batch_sizes(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes for which graphs are captured, ascending.

    Dense where steps are short and a padded row would show, wider apart above.
    """
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_batch + 32, 32)]
    return (*(size for size in sizes if size < max_batch), max_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InFlight:
    rows: list[int]
    sampled: Tensor
    """[max_batch] int64 in host memory, filled once `timing` is passed."""
    told: Told | None
    """To be settled then."""
    timing: Timing
    """Of its way to the device and back as well."""


class GraphDecoder:
    """See `shared.engine.decoding.Decoder`.

    Args:
        model: The model.
        pools: The own pool, and the peer's where blocks are read in place.
        layout: The own pool's layout.
        max_batch: Most sequences of a step.
        max_context_len: Longest context of any, in tokens.

    Takes its memory and captures its graphs at once, some seconds for a large model.
    """

    depth = DEPTH

    def __init__(
        self,
        model: Llama,
        pools: PoolPair,
        layout: KVLayout,
        *,
        max_batch: int,
        max_context_len: int,
    ) -> None:
        self._model, self.pools = model, pools
        self._stream = DeviceStream(model.device)
        self._sizes = batch_sizes(max_batch)
        self._rows = DecodeRows(max_batch)
        self._inputs = DecodeInputs(
            layout, max_batch=max_batch, max_context_len=max_context_len, device=model.device
        )
        self._head = GraphHead(model, max_batch)
        shape = self._inputs.shape
        self._staging = [self._stream.host_tensor(*shape) for _ in range(DEPTH + 1)]
        self._outputs = [self._stream.host_tensor(max_batch) for _ in range(DEPTH + 1)]
        self._num_launched = 0
        self._in_flight: deque[_InFlight] = deque()
        model.prepare_decode(max_batch=max_batch, max_context_len=self._inputs.max_context_len)
        self._lonely_staging = self._stream.host_tensor(*shape)
        self._lonely_output = self._stream.host_tensor(max_batch)
        self._nothing = torch.zeros(1, device=model.device)
        warm_up_sampler(model.device, model.spec.vocab_size)
        self._replays = self._capture()
        self._replay_lonely = self._stream.capture(self._lonely_step)
        self._rehearse = self._stream.capture(self._next_to_nothing)

    @property
    def num_in_flight(self) -> int:
        """See `Decoder.num_in_flight`."""
        return len(self._in_flight)

    def set_peer(self, kv: Tensor | None) -> None:
        """Let graphs read a peer's pool from now on; see `Decoder.set_peer`."""
        with self._stream.current():
            self.pools = self.pools.with_peer(kv)

    def launch(self, steps: Sequence[DecodeStep]) -> None:
        """Enqueue a step; see `Decoder.launch`."""
        if len(self._in_flight) >= DEPTH:
            raise ValueError(f"{DEPTH} steps are in flight; collect one first")
        plan = self._rows.plan([step.key for step in steps])
        with self._stream.current():
            self._inputs.hold_tables(steps, plan.rows)
            staging = self._staging[self._num_launched % len(self._staging)]
            self._inputs.fill(staging, steps, plan)
            timing = self._stream.begin_timing()  # here: the host's part of a step lies before
            self._inputs.upload(staging)
            self._replays[self._size_for(len(steps))]()
            told = self._choose(steps, plan.rows)
            sampled = self._outputs[self._num_launched % len(self._outputs)]
            sampled.copy_(self._head.sampled, non_blocking=True)
            timing.end()
        self._num_launched += 1
        self._in_flight.append(_InFlight(rows=plan.rows, sampled=sampled, told=told, timing=timing))

    def prepare(self, step: DecodeStep) -> _LonelyStep:
        """Write all of a step's inputs but the token; see `PreparingDecoder.prepare`."""
        if self._in_flight:
            raise ValueError("a step is in flight; it would move the row that is made ready")
        step = replace(step, token_id=0)
        plan = self._rows.plan([step.key])
        (row,) = plan.rows
        with self._stream.current():
            self._inputs.hold_tables([step], plan.rows)
        self._inputs.fill(self._lonely_staging, [step], plan)
        return _LonelyStep(self, step, row, self._num_launched)

    def rehearse(self) -> None:
        """Have the device do next to nothing, by the way that steps take."""
        with self._stream.current():
            self._rehearse()

    def launch_lonely(self, step: DecodeStep, row: int, token_id: int, *, number: int) -> bool:
        """Launch what `prepare` made ready when `number` steps had been launched."""
        if number != self._num_launched:
            return False
        self._lonely_staging[TOKEN, row] = token_id
        with self._stream.current():
            timing = self._stream.begin_timing()
            self._replay_lonely()
            told = self._choose([step], [row])
            if not is_plain(step):
                self._lonely_output.copy_(self._head.sampled, non_blocking=True)
            timing.end()
        self._num_launched += 1
        self._in_flight.append(
            _InFlight(rows=[row], sampled=self._lonely_output, told=told, timing=timing)
        )
        return True

    def is_done(self) -> bool:
        """See `Decoder.is_done`."""
        return bool(self._in_flight) and self._in_flight[0].timing.is_passed()

    def collect(self) -> Collected[int]:
        """See `Decoder.collect`."""
        oldest = self._in_flight.popleft()
        oldest.timing.wait()
        if oldest.told is not None:
            oldest.told.settle()
        sampled = oldest.sampled.tolist()
        token_ids = tuple(sampled[row] for row in oldest.rows)
        return Collected(token_ids=token_ids, device_ns=oldest.timing.device_ns())

    def _choose(self, steps: Sequence[DecodeStep], rows: Sequence[int]) -> Told | None:
        """Enqueue the choices that a graph does not make, and the way back of what they tell."""
        told = self._head.choose(steps, rows)
        if told is not None:
            told.fetch(self._stream.to_host)
        return told

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    # --- graphs ------------------------------------------------------------------------------

    def _capture(self) -> dict[int, Callable[[], None]]:
        """Return for each size what runs a step of it."""
        self._stream.follow_all()
        with self._stream.current():
            for staging in (self._staging[0], self._lonely_staging):  # steps that write nowhere
                self._inputs.fill(staging, [], RowPlan(rows=[], previous_rows=[]))
            self._inputs.upload(self._staging[0])
            # The largest first: the smaller ones then find its memory.
            return {
                size: self._stream.capture(partial(self._step, size))
                for size in sorted(self._sizes, reverse=True)
            }

    def _next_to_nothing(self) -> None:
        self._nothing.add_(1)

    def _lonely_step(self) -> None:
        """Run a step of one row, its inputs' and its output's way between host and device too."""
        self._inputs.upload(self._lonely_staging)
        self._step(self._sizes[0])
        self._lonely_output.copy_(self._head.sampled, non_blocking=True)

    def _step(self, size: int) -> None:
        """Compute the first `size` rows; the token of each is in `_head` afterwards."""
        batch = self._inputs.batch(size, self._head.sampled)
        self._head.take_likeliest(self._model.decode(batch, self.pools))


class _LonelyStep:
    """See `shared.engine.decoding.PreparedStep`."""

    def __init__(self, decoder: GraphDecoder, step: DecodeStep, row: int, number: int) -> None:
        self._decoder, self._step, self._row, self._number = decoder, step, row, number

    def rehearse(self) -> None:
        self._decoder.rehearse()

    def launch(self, token_id: int) -> bool:
        return self._decoder.launch_lonely(self._step, self._row, token_id, number=self._number)
