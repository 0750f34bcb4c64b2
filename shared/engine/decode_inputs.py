"""What a captured decode step reads: numbers in buffers of fixed address, and how they get there.

A row's block table is written when the row changes hands, or when the table has changed.  What
changes with every step (token, position, slot, length of the context) is one field each of one
transfer, which the host writes to a staging of its own first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.kv.layout import RESERVED_BLOCK
from shared.model.batch import DecodeBatch
from shared.ops.kv_write import PAD_SLOT
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.decode_rows import RowPlan
    from shared.engine.decoding import DecodeStep
    from shared.kv.layout import KVLayout

# What changes with every step, one field of the transfer each.
TOKEN, SOURCE, POSITION, SLOT, CONTEXT = range(5)
NUM_FIELDS = 5

NO_SOURCE = -1
"""In `SOURCE`: the token is the one that `TOKEN` says, and not one that an earlier step left."""


class DecodeInputs:
    """The numbers of the next step, on the device.

    Args:
        layout: The own pool's layout.
        max_batch: Most sequences of a step.
        max_context_len: Longest context of any, in tokens.
        device: Where steps run.
    """

    def __init__(
        self, layout: KVLayout, *, max_batch: int, max_context_len: int, device: torch.device
    ) -> None:
        self._layout, self._device = layout, device
        self._max_blocks = layout.num_blocks_for(max_context_len)
        self._tables: list[Sequence[int] | None] = [None] * max_batch
        """Which block table each row holds on the device; compared by identity."""
        self._fields = torch.zeros((NUM_FIELDS, max_batch), dtype=torch.int64, device=device)
        self._block_tables = torch.zeros(
            (max_batch, self._max_blocks), dtype=torch.int32, device=device
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Of a staging, which is int64."""
        return NUM_FIELDS, len(self._tables)

    @property
    def max_context_len(self) -> int:
        """Tokens of the longest context that a row's block table has room for."""
        return self._max_blocks * self._layout.block_size

    def hold_tables(self, steps: Sequence[DecodeStep], rows: Sequence[int]) -> None:
        """Enqueue what brings the block tables of a step into its rows.

        Args:
            steps: The sequences.
            rows: The row of each.

        Raises:
            ValueError: A table is longer than the longest context.
        """
        for step, row in zip(steps, rows, strict=True):
            if self._tables[row] is not step.block_table:
                self._replace(row, step.block_table)

    def _replace(self, row: int, table: Sequence[int]) -> None:
        num_blocks = len(table)
        if num_blocks > self._max_blocks:
            raise ValueError(f"a table of {num_blocks} blocks does not fit {self._max_blocks}")
        known = self._tables[row] or ()
        # Most often the table is the one before and a block: comparing is cheaper than uploading.
        start = len(known) if table[: len(known)] == known else 0
        if start < num_blocks:
            added = np.array(table[start:], dtype=np.int32)
            self._block_tables[row, start:num_blocks] = to_device(added, self._device)
        self._tables[row] = table

    def fill(self, staging: Tensor, steps: Sequence[DecodeStep], plan: RowPlan) -> None:
        """Write what changes with every step to host memory that no earlier step still needs.

        Args:
            staging: [`shape`] int64, whatever is in it.
            steps: The sequences; rows beyond theirs have no slot and no context.
            plan: Where they are.

        Raises:
            ValueError: A token has no place in its blocks, would go to a block that is not ours,
                or is not known.
        """
        fields = staging.numpy()
        fields[SLOT] = PAD_SLOT
        fields[CONTEXT] = 0
        fields[TOKEN] = 0
        fields[SOURCE] = NO_SOURCE
        fields[POSITION] = 0
        tokens, sources, positions, slots = [], [], [], []
        for step, previous_row in zip(steps, plan.previous_rows, strict=True):
            if step.token_id is None and previous_row is None:
                raise ValueError("the token to compute is not known, and no step brings it")
            tokens.append(0 if step.token_id is None else step.token_id)
            sources.append(previous_row if step.token_id is None else NO_SOURCE)
            positions.append(step.position)
            slots.append(self._slot_of(step))
        rows = plan.rows
        fields[TOKEN, rows] = tokens
        fields[SOURCE, rows] = sources
        fields[POSITION, rows] = positions
        fields[SLOT, rows] = slots
        fields[CONTEXT, rows] = fields[POSITION, rows] + 1

    def _slot_of(self, step: DecodeStep) -> int:
        number, offset = divmod(step.position, self._layout.block_size)
        if not 0 <= number < len(step.block_table):
            raise ValueError(
                f"a table of {len(step.block_table)} blocks does not reach position {step.position}"
            )
        block = step.block_table[number]
        if not RESERVED_BLOCK < block < self._layout.num_blocks:
            raise ValueError(f"the token at {step.position} would go to block {block}")
        return block * self._layout.block_size + offset

    def upload(self, staging: Tensor) -> None:
        """Enqueue the transfer of a staging; a graph may capture this."""
        self._fields.copy_(staging, non_blocking=True)

    def batch(self, size: int, sampled: Tensor) -> DecodeBatch:
        """Return the first `size` rows as the model takes them; a graph may capture this.

        Args:
            size: Rows.
            sampled: [max_batch] int64, the token that the last step left in each row.
        """
        fields = self._fields[:, :size]
        source = fields[SOURCE]
        token_ids = torch.where(source == NO_SOURCE, fields[TOKEN], sampled[source.clamp(min=0)])
        return DecodeBatch(
            token_ids=token_ids,
            positions=fields[POSITION],
            slot_mapping=fields[SLOT],
            block_tables=self._block_tables[:size],
            context_lens=fields[CONTEXT].int(),
        )
