"""Which row of the decode buffers belongs to which sequence.  Pure.

Rows 0 to n - 1 are taken and no other, so a batch of n sequences runs in the smallest graph that
has n rows.  When a sequence leaves, the last rows move into the holes; everybody else stays, since
what a row holds on the device (its block table, the token it sampled) is dear to move.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """Where the sequences of a step are, in the step's order."""

    rows: list[int]
    """The row of each."""
    previous_rows: list[int | None]
    """Its row in the step before; None where it had none."""


class DecodeRows:
    """The rows of the last step.

    Args:
        max_rows: How many there are.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._row_of: dict[Hashable, int] = {}
        self._keys: list[Hashable] = []
        self._steady = RowPlan(rows=[], previous_rows=[])

    def plan(self, keys: Sequence[Hashable]) -> RowPlan:
        """Give every sequence of the next step a row.

        Args:
            keys: The sequences, each once.  Those of the last step that are not among them lose
                their rows.

        Raises:
            ValueError: There are more than rows, or one is named twice.
        """
        if self._keys == keys:
            return self._steady
        wanted = set(keys)
        if len(wanted) != len(keys):
            raise ValueError("a sequence is named twice in one step")
        if len(keys) > self._max_rows:
            raise ValueError(f"{len(keys)} sequences do not fit {self._max_rows} rows")
        previous = self._row_of
        staying = {key: row for key, row in previous.items() if key in wanted and row < len(keys)}
        holes = iter(sorted(set(range(len(keys))) - set(staying.values())))
        self._row_of = {key: staying[key] if key in staying else next(holes) for key in keys}
        self._keys = list(keys)
        rows = [self._row_of[key] for key in keys]
        self._steady = RowPlan(rows=rows, previous_rows=[*rows])
        return RowPlan(rows=rows, previous_rows=[previous.get(key) for key in keys])
