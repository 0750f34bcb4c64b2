"""Short steps of any make-up as numbers of fixed place: what a CUDA graph of them reads.

A graph is captured for each of `step_sizes`, and a step runs in the smallest that holds its tokens.
All its numbers are one run of int64, so that one copy brings them to the device; what does not
depend on the size comes first, so that every graph finds it in the same place.

A step is short if it has few tokens, and if what they look at together is little enough: where
there is more to compute, the host is ahead of the GPU anyway, and there are faster kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from shared.model.batch import PaddedBatch
from shared.ops.kv_write import PAD_SLOT
from shared.ops.tiled_attention import TILE_ROWS, TileField

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.batch import PackedSteps, SequenceStep

MAX_TOKENS = 1024
"""Of a short step.  More take a GPU longer to compute than any host needs to launch them."""

MAX_SEQUENCES = 8
"""Of a short step.  Their last rows cost no more than one row does: what takes time is to load the
weights.  More of them seldom come at once and are still short."""

MAX_CONTEXT = 16_384
"""Tokens that the sequences of a short step have together, those before the step included: 128 KiB
of block ids at one token a block."""

MAX_PAIRS = 1 << 21
"""Tokens of a step times tokens that each may look at, 1,024 times 2,048 or 128 times 16,384: up
to there attention by tiles takes some 4 ms more than cuDNN in 32 layers, which is less than the
launches would."""

UNIT = 128
"""Sizes from here on are multiples of it.  Products are computed in tiles of so many rows, so
what fills the last one up costs little."""


def step_sizes(token_budget: int) -> tuple[int, ...]:
    """Return the numbers of tokens for which graphs are captured, ascending.

    Args:
        token_budget: Most tokens of any step.
    """
    sizes = (16, 32, 64, *range(UNIT, MAX_TOKENS + 1, UNIT))
    return tuple(
        size for below, size in zip((0, *sizes), sizes, strict=False) if below < token_budget
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the numbers of a step are in the run."""

    size: int
    """Tokens, those that pad included."""
    num_entries: int
    """Of the block table."""

    @property
    def num_tiles(self) -> int:
        """Tiles: each sequence may end within one."""
        return self.size // TILE_ROWS + MAX_SEQUENCES

    @property
    def num_numbers(self) -> int:
        """Length of the run."""
        return sum(self._lengths)

    @property
    def _lengths(self) -> tuple[int, ...]:
        fields = len(TileField)
        return (
            MAX_SEQUENCES,
            MAX_SEQUENCES * fields,
            self.num_entries,
            3 * self.size,
            self.num_tiles * fields,
        )

    def split(self, run: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return views of a run: output index, output tiles, block table, tokens, tiles."""
        ends = tuple(accumulate(self._lengths))
        index, output_tiles, table, tokens, tiles = (
            run[end - length : end] for end, length in zip(ends, self._lengths, strict=True)
        )
        fields = len(TileField)
        return (
            index,
            output_tiles.reshape(MAX_SEQUENCES, fields),
            table,
            tokens.reshape(3, self.size),
            tiles.reshape(self.num_tiles, fields),
        )


def num_entries_for(block_size: int) -> int:
    """Return how many block ids the sequences of a short step have together, at most."""
    return -(-MAX_CONTEXT // block_size) + MAX_SEQUENCES


def is_short(steps: Sequence[SequenceStep], *, max_tokens: int) -> bool:
    """Whether a step is one of those that graphs are for.

    Args:
        steps: Its sequences.
        max_tokens: The largest size for which there is a graph.
    """
    contexts = [step.context_len for step in steps]
    lengths = [len(step.token_ids) for step in steps]
    return (
        len(steps) <= MAX_SEQUENCES
        and sum(lengths) <= max_tokens
        and sum(contexts) <= MAX_CONTEXT
        and sum(map(int.__mul__, lengths, contexts)) <= MAX_PAIRS
    )


def padded_batch(places: Places, run: Tensor) -> PaddedBatch:
    """Return the step whose numbers are in a run on the device."""
    index, output_tiles, table, tokens, tiles = places.split(run)
    return PaddedBatch(
        token_ids=tokens[0],
        positions=tokens[1],
        slot_mapping=tokens[2],
        tiles=tiles,
        output_index=index,
        output_tiles=output_tiles,
        block_table=table,
    )


def fill(places: Places, run: Tensor, packed: PackedSteps | None) -> None:
    """Write a step's numbers into a run in host memory; None is a step that only pads.

    Args:
        places: Of a size that holds the step.
        run: At least [places.num_numbers] int64, whatever is in it.
        packed: The step, short in the sense of `is_short`.
    """
    index, output_tiles, table, tokens, tiles = (piece.numpy() for piece in places.split(run))
    index[:], output_tiles[:], tiles[:] = 0, 0, 0
    num_tokens = 0 if packed is None else packed.tokens.shape[1]
    tokens[:2, num_tokens:], tokens[2, num_tokens:] = 0, PAD_SLOT
    if packed is None:
        return
    tokens[:, :num_tokens] = packed.tokens
    rows = packed.sampled_rows
    index[: len(rows)] = rows
    cut: list[tuple[int, int, int, int]] = []
    outputs: list[tuple[int, int, int, int]] = []
    entry = 0
    ends = [*packed.starts[1:], num_tokens]
    wanted = frozenset(rows)
    for start, end, blocks in zip(packed.starts, ends, packed.block_tables, strict=True):
        table[entry : entry + len(blocks)] = blocks
        first_position = int(packed.tokens[1, start])
        cut += [
            (row, min(TILE_ROWS, end - row), first_position + row - start, entry)
            for row in range(start, end, TILE_ROWS)
        ]
        if end - 1 in wanted:
            outputs.append((len(outputs), 1, first_position + end - 1 - start, entry))
        entry += len(blocks)
    # Those with most to look at first: the last thread blocks to run are then the short ones.
    cut.sort(key=lambda tile: tile[TileField.POSITION], reverse=True)
    tiles[: len(cut)] = cut
    if outputs:
        # What pads repeats the last one: numbers, where else there might be none.
        index[len(rows) :] = rows[-1]
        output_tiles[: len(outputs)], output_tiles[len(outputs) :] = outputs, outputs[-1]
        output_tiles[:, TileField.ROW] = range(MAX_SEQUENCES)
