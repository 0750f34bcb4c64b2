"""Decode steps on a GPU: captured once for each batch size, launched ahead of the host.

What a step needs lies in buffers of fixed address.  A row belongs to one sequence for as long as it
runs (`decode_rows.py`).  A row's block table and sampling parameters are written when it changes
hands; what changes with every step (position, slot, length of the context) comes in one transfer.
The token to compute comes from the device itself: the step before left it in its row, and the
host, which has not seen it yet, only says which row that is.

Sizes.  A graph is captured for each of `batch_sizes`, and a batch runs in the smallest that holds
it; the rows beyond have no slot and no context and cost next to nothing.

The graph takes the likeliest token of every row; other choices come behind it (`graph_head.py`).

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

import numpy as np
import torch

from shared.engine.choosing import is_plain
from shared.engine.decode_rows import DecodeRows
from shared.engine.device_stream import DeviceStream
from shared.engine.graph_head import GraphHead
from shared.kv.layout import RESERVED_BLOCK
from shared.model.batch import DecodeBatch
from shared.ops.kv_write import PAD_SLOT
from shared.ops.sampler import warm_up_sampler
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.choosing import Told
    from shared.engine.decoding import DecodeStep
    from shared.engine.device_stream import Mark
    from shared.kv.layout import KVLayout
    from shared.model.llama import Llama
    from shared.ops.pool_pair import PoolPair

DEPTH = 2
"""The step that runs and the one behind it: the GPU never waits, and a token of a sequence that has
ended is computed at most once in vain."""

# What changes with every step, one row of the transfer each.
TOKEN, SOURCE, POSITION, SLOT, CONTEXT = range(5)
NUM_FIELDS = 5
NO_SOURCE = -1


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
    """[max_batch] int64 in host memory, filled once `mark` is passed."""
    told: Told | None
    """To be settled then."""
    mark: Mark


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
        self._model, self.pools, self._layout = model, pools, layout
        self._stream = DeviceStream(model.device)
        self._sizes = batch_sizes(max_batch)
        self._rows = DecodeRows(max_batch)
        self._tables: list[Sequence[int] | None] = [None] * max_batch
        """Which block table each row holds on the device; compared by identity."""
        max_blocks = layout.num_blocks_for(max_context_len)
        device = model.device
        self._fields = torch.zeros((NUM_FIELDS, max_batch), dtype=torch.int64, device=device)
        self._block_tables = torch.zeros((max_batch, max_blocks), dtype=torch.int32, device=device)
        self._head = GraphHead(model, max_batch)
        self._staging = [self._stream.host_tensor(NUM_FIELDS, max_batch) for _ in range(DEPTH + 1)]
        self._outputs = [self._stream.host_tensor(max_batch) for _ in range(DEPTH + 1)]
        self._num_launched = 0
        self._in_flight: deque[_InFlight] = deque()
        model.prepare_decode(max_batch=max_batch, max_context_len=max_blocks * layout.block_size)
        self._lonely_staging = self._stream.host_tensor(NUM_FIELDS, max_batch)
        self._lonely_output = self._stream.host_tensor(max_batch)
        self._nothing = torch.zeros(1, device=device)
        warm_up_sampler(device, model.spec.vocab_size)
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
            for step, row in zip(steps, plan.rows, strict=True):
                if self._tables[row] is not step.block_table:
                    self._take_row(row, step)
            staging = self._staging[self._num_launched % len(self._staging)]
            self._fill(staging, steps, plan.rows, plan.previous_rows)
            self._fields.copy_(staging, non_blocking=True)
            self._replays[self._size_for(len(steps))]()
            told = self._head.choose(steps, plan.rows)
            if told is not None:
                told.fetch(self._stream.to_host)
            sampled = self._outputs[self._num_launched % len(self._outputs)]
            sampled.copy_(self._head.sampled, non_blocking=True)
            mark = self._stream.mark()
        self._num_launched += 1
        self._in_flight.append(_InFlight(rows=plan.rows, sampled=sampled, told=told, mark=mark))

    def prepare(self, step: DecodeStep) -> _LonelyStep:
        """Write all of a step's inputs but the token; see `PreparingDecoder.prepare`."""
        if self._in_flight:
            raise ValueError("a step is in flight; it would move the row that is made ready")
        step = replace(step, token_id=0)
        plan = self._rows.plan([step.key])
        (row,) = plan.rows
        with self._stream.current():
            if self._tables[row] is not step.block_table:
                self._take_row(row, step)
        self._fill(self._lonely_staging, [step], plan.rows, plan.previous_rows)
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
            self._replay_lonely()
            told = self._head.choose([step], [row])
            if told is not None:
                told.fetch(self._stream.to_host)
            if not is_plain(step):
                self._lonely_output.copy_(self._head.sampled, non_blocking=True)
            mark = self._stream.mark()
        self._num_launched += 1
        self._in_flight.append(
            _InFlight(rows=[row], sampled=self._lonely_output, told=told, mark=mark)
        )
        return True

    def is_done(self) -> bool:
        """See `Decoder.is_done`."""
        return bool(self._in_flight) and self._in_flight[0].mark.is_passed()

    def collect(self) -> tuple[int, ...]:
        """See `Decoder.collect`."""
        oldest = self._in_flight.popleft()
        oldest.mark.wait()
        if oldest.told is not None:
            oldest.told.settle()
        sampled = oldest.sampled.tolist()
        return tuple(sampled[row] for row in oldest.rows)

    # --- a step ------------------------------------------------------------------------------

    def _take_row(self, row: int, step: DecodeStep) -> None:
        """Put a sequence's block table into a row."""
        num_blocks = len(step.block_table)
        if num_blocks > self._block_tables.shape[1]:
            raise ValueError(
                f"a table of {num_blocks} blocks does not fit {self._block_tables.shape[1]}"
            )
        known = self._tables[row] or ()
        # Most often the table is the one before and a block: comparing is cheaper than uploading.
        start = len(known) if step.block_table[: len(known)] == known else 0
        if start < num_blocks:
            table = np.array(step.block_table[start:], dtype=np.int32)
            self._block_tables[row, start:num_blocks] = to_device(table, self._model.device)
        self._tables[row] = step.block_table

    def _fill(
        self,
        staging: Tensor,
        steps: Sequence[DecodeStep],
        rows: list[int],
        previous_rows: list[int | None],
    ) -> None:
        """Write what changes with every step to host memory that no earlier step still needs."""
        block_size, num_blocks = self._layout.block_size, self._layout.num_blocks
        fields = staging.numpy()
        fields[SLOT] = PAD_SLOT
        fields[CONTEXT] = 0
        fields[TOKEN] = 0
        fields[SOURCE] = NO_SOURCE
        fields[POSITION] = 0
        tokens, sources, positions, slots = [], [], [], []
        for step, previous_row in zip(steps, previous_rows, strict=True):
            number, offset = divmod(step.position, block_size)
            if not (0 <= number < len(step.block_table)):
                raise ValueError(
                    f"a table of {len(step.block_table)} blocks does not reach "
                    f"position {step.position}"
                )
            block = step.block_table[number]
            if not RESERVED_BLOCK < block < num_blocks:
                raise ValueError(f"the token at {step.position} would go to block {block}")
            if step.token_id is None and previous_row is None:
                raise ValueError("the token to compute is not known, and no step brings it")
            tokens.append(0 if step.token_id is None else step.token_id)
            sources.append(previous_row if step.token_id is None else NO_SOURCE)
            positions.append(step.position)
            slots.append(block * block_size + offset)
        fields[TOKEN, rows] = tokens
        fields[SOURCE, rows] = sources
        fields[POSITION, rows] = positions
        fields[SLOT, rows] = slots
        fields[CONTEXT, rows] = fields[POSITION, rows] + 1

    def _size_for(self, num_rows: int) -> int:
        return next(size for size in self._sizes if size >= num_rows)

    # --- graphs ------------------------------------------------------------------------------

    def _capture(self) -> dict[int, Callable[[], None]]:
        """Return for each size what runs a step of it."""
        self._stream.follow_all()
        with self._stream.current():
            fields = self._staging[0]
            fields.zero_()
            fields[SLOT] = PAD_SLOT
            fields[SOURCE] = NO_SOURCE
            self._fields.copy_(fields)
            # The largest first: the smaller ones then find its memory.
            return {
                size: self._stream.capture(partial(self._step, size))
                for size in sorted(self._sizes, reverse=True)
            }

    def _next_to_nothing(self) -> None:
        self._nothing.add_(1)

    def _lonely_step(self) -> None:
        """Run a step of one row, its inputs' and its output's way between host and device too."""
        self._fields.copy_(self._lonely_staging, non_blocking=True)
        self._step(self._sizes[0])
        self._lonely_output.copy_(self._head.sampled, non_blocking=True)

    def _step(self, size: int) -> None:
        """Compute the first `size` rows; the token of each is in `_head` afterwards."""
        fields = self._fields[:, :size]
        source = fields[SOURCE]
        token_ids = torch.where(
            source == NO_SOURCE, fields[TOKEN], self._head.sampled[source.clamp(min=0)]
        )
        batch = DecodeBatch(
            token_ids=token_ids,
            positions=fields[POSITION],
            slot_mapping=fields[SLOT],
            block_tables=self._block_tables[:size],
            context_lens=fields[CONTEXT].int(),
        )
        self._head.take_likeliest(self._model.decode(batch, self.pools))


class _LonelyStep:
    """See `shared.engine.decoding.PreparedStep`."""

    def __init__(self, decoder: GraphDecoder, step: DecodeStep, row: int, number: int) -> None:
        self._decoder, self._step, self._row, self._number = decoder, step, row, number

    def rehearse(self) -> None:
        self._decoder.rehearse()

    def launch(self, token_id: int) -> bool:
        return self._decoder.launch_lonely(self._step, self._row, token_id, number=self._number)
