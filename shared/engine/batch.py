"""Turns a step's plain lists into the tensors that the forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shared.kv.layout import RESERVED_BLOCK
from shared.model.batch import ForwardBatch
from shared.ops.attention import SequenceSpan
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from shared.engine.history import TokenHistory
    from shared.kv.layout import KVLayout
    from shared.ops.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """One sequence's part of a step: a prefill chunk, or one decoded token.

    The keys and values of all its earlier tokens are in the blocks already.
    """

    token_ids: Sequence[int]
    """The tokens to compute, at least one."""
    start_position: int
    """Position of the first of them: how many tokens of the sequence were computed before."""
    block_table: Sequence[int]
    """The sequence's blocks in order; they may reach beyond these tokens.  Leading ones may be in
    the peer's pool and are named `~block` then (`shared.ops.pool_pair`)."""
    sampling: SamplingParams | None
    """How to choose the token after the last of them; None when more of the prompt follows, and
    then no logits are computed."""
    history: TokenHistory | None = None
    """What was said so far, where sampling looks at it or is to tell of it."""

    @property
    def context_len(self) -> int:
        """Tokens of the sequence that are computed after this step.

        Also the position that a token sampled by it will have.
        """
        return self.start_position + len(self.token_ids)


def build_batch(
    steps: Sequence[SequenceStep],
    layout: KVLayout,
    device: torch.device,
    *,
    all_outputs: bool = False,
    window: int | None = None,
    peer: Tensor | None = None,
) -> ForwardBatch:
    """Pack sequences into one batch, in their order.

    Args:
        steps: The sequences.
        layout: The pool's.
        device: Where the batch is computed.
        all_outputs: Whether every token's hidden state is wanted, not just those from which a
            token is sampled.
        window: The model's sliding window, `ModelSpec.sliding_window`.
        peer: The peer's pool, where tables name blocks of it.

    Raises:
        ValueError: There is no sequence, one has no tokens or a negative position, or its blocks
            do not reach its last token or are not blocks of the pool.
    """
    packed = pack_steps(steps, layout, num_peer_blocks=0 if peer is None else peer.shape[0])
    rows = packed.sampled_rows
    # One transfer for the whole step; every copy to a GPU has a fixed price.
    flat = to_device(
        np.concatenate(
            [packed.tokens.ravel(), np.array(rows, dtype=np.int64), *packed.block_tables]
        ),
        device,
    )
    num_tokens = packed.tokens.shape[1]
    sizes = [*(num_tokens,) * 3, len(rows), *(len(table) for table in packed.block_tables)]
    pieces = torch.split(flat, sizes)
    spans = tuple(
        SequenceSpan(
            query_start=start,
            query_len=len(step.token_ids),
            context_len=step.context_len,
            block_table=block_table,
            num_in_place=num_in_place,
            window=window,
        )
        for step, num_in_place, block_table, start in zip(
            steps, packed.nums_in_place, pieces[4:], packed.starts, strict=True
        )
    )
    return ForwardBatch(
        token_ids=pieces[0],
        positions=pieces[1],
        slot_mapping=pieces[2],
        spans=spans,
        peer=peer,
        output_rows=None if all_outputs else rows,
        output_index=None if all_outputs else pieces[3],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSteps:
    """A step's numbers in host memory, its sequences one behind the other."""

    tokens: NDArray[np.int64]
    """[3, num_tokens]: ids, positions, and slots in the pool."""
    starts: list[int]
    """The first row of each sequence."""
    sampled_rows: tuple[int, ...]
    """Rows from which a token is sampled, ascending."""
    block_tables: list[NDArray[np.int64]]
    """Of each sequence, the blocks that hold it up to the step's last token, by the numbers that
    they have in their pool."""
    nums_in_place: list[int]
    """How many of the leading ones are the peer's, of each sequence; the others are our own."""


def pack_steps(
    steps: Sequence[SequenceStep], layout: KVLayout, *, num_peer_blocks: int = 0
) -> PackedSteps:
    """Lay out a step's numbers, checked.

    Args:
        steps: The sequences.
        layout: The pool's.
        num_peer_blocks: Of the peer's pool, where tables may name blocks of it.

    Raises:
        ValueError: As `build_batch`.
    """
    if not steps:
        raise ValueError("a step needs at least one sequence")
    tables = [
        _blocks_in_use(index, step, layout, num_peer_blocks) for index, step in enumerate(steps)
    ]
    starts = list(accumulate((len(step.token_ids) for step in steps), initial=0))
    tokens = np.empty((3, starts.pop()), dtype=np.int64)
    for step, table, start in zip(steps, tables, starts, strict=True):
        token_ids, positions, slots = tokens[:, start : start + len(step.token_ids)]
        token_ids[:] = step.token_ids
        positions[:] = np.arange(step.start_position, step.context_len)
        number, offset = np.divmod(positions, layout.block_size)
        slots[:] = table.blocks[number] * layout.block_size + offset
    return PackedSteps(
        tokens=tokens,
        starts=starts,
        sampled_rows=sampled_rows(steps),
        block_tables=[table.blocks for table in tables],
        nums_in_place=[table.num_in_place for table in tables],
    )


def sampled_rows(steps: Sequence[SequenceStep]) -> tuple[int, ...]:
    """Return the rows of a batch of these steps from which a token is sampled, ascending."""
    last_rows = accumulate((len(step.token_ids) for step in steps), initial=-1)
    next(last_rows)
    return tuple(
        row for row, step in zip(last_rows, steps, strict=True) if step.sampling is not None
    )


class _Table(NamedTuple):
    """The blocks that hold a sequence up to a step's last token."""

    blocks: NDArray[np.int64]
    num_in_place: int
    """The leading ones that are the peer's; the others are our own."""


def _blocks_in_use(
    index: int, step: SequenceStep, layout: KVLayout, num_peer_blocks: int
) -> _Table:
    """Return a sequence's blocks, checked: each is a block of the pool that it is said to be in."""
    if not step.token_ids:
        raise ValueError(f"sequence {index} of the step has no tokens")
    if step.start_position < 0:
        raise ValueError(f"sequence {index} of the step starts at {step.start_position}")
    num_blocks = layout.num_blocks_for(step.context_len)
    blocks = np.array(step.block_table[:num_blocks], dtype=np.int64)
    if len(blocks) < num_blocks:
        raise ValueError(
            f"sequence {index} of the step has {len(blocks)} blocks; {step.context_len} tokens "
            f"need {num_blocks}"
        )
    is_own = blocks >= 0
    num_in_place = int(is_own.argmax()) if is_own.any() else num_blocks
    if num_in_place > step.start_position // layout.block_size:
        raise ValueError(f"sequence {index} of the step would write to the peer's pool")
    blocks[:num_in_place] ^= -1  # what `~` is, in place
    own, peer = blocks[num_in_place:], blocks[:num_in_place]
    # A wrong id would overwrite another request's cache, or the proof in the reserved block.
    if own.min() <= RESERVED_BLOCK or own.max() >= layout.num_blocks:
        raise ValueError(
            f"sequence {index} of the step names a block outside 1 to {layout.num_blocks - 1}"
        )
    if num_in_place and (peer.min() <= RESERVED_BLOCK or peer.max() >= num_peer_blocks):
        raise ValueError(
            f"sequence {index} of the step names a block of the peer's outside 1 to "
            f"{num_peer_blocks - 1}"
        )
    return _Table(blocks, num_in_place)
