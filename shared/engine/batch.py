"""Turns a step's plain lists into the tensors that the forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.kv.layout import RESERVED_BLOCK
from shared.model.batch import ForwardBatch
from shared.ops.attention import SequenceSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

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
    """The sequence's blocks in order; they may reach beyond these tokens."""
    sampling: SamplingParams | None
    """How to choose the token after the last of them; None when more of the prompt follows, and
    then no logits are computed."""
    history: TokenHistory | None = None
    """What was said so far, where `sampling` depends on it; the step adds its token."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens to tell with the sampled one's probability; None tells
    neither."""

    @property
    def context_len(self) -> int:
        """Tokens of the sequence that are computed after this step.

        Also the position that a token sampled by it will have.
        """
        return self.start_position + len(self.token_ids)


def build_batch(
    steps: Sequence[SequenceStep], layout: KVLayout, device: torch.device
) -> ForwardBatch:
    """Pack sequences into one batch, in their order.

    Raises:
        ValueError: There is no sequence, one has no tokens or a negative position, or its blocks
            do not reach its last token or are not blocks of the pool.
    """
    if not steps:
        raise ValueError("a step needs at least one sequence")
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceSpan] = []
    for index, step in enumerate(steps):
        blocks = _blocks_in_use(index, step, layout)
        spans.append(
            SequenceSpan.of(
                query_start=len(token_ids),
                query_len=len(step.token_ids),
                context_len=step.context_len,
                block_table=torch.tensor(blocks, dtype=torch.int64, device=device),
            )
        )
        token_ids.extend(step.token_ids)
        for position in range(step.start_position, step.context_len):
            number, offset = divmod(position, layout.block_size)
            positions.append(position)
            slots.append(blocks[number] * layout.block_size + offset)
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        spans=tuple(spans),
    )


def _blocks_in_use(index: int, step: SequenceStep, layout: KVLayout) -> list[int]:
    """Return the blocks that hold the sequence up to this step's last token."""
    if not step.token_ids:
        raise ValueError(f"sequence {index} of the step has no tokens")
    if step.start_position < 0:
        raise ValueError(f"sequence {index} of the step starts at {step.start_position}")
    num_blocks = layout.num_blocks_for(step.context_len)
    blocks = list(step.block_table[:num_blocks])
    if len(blocks) < num_blocks:
        raise ValueError(
            f"sequence {index} of the step has {len(blocks)} blocks; {step.context_len} tokens "
            f"need {num_blocks}"
        )
    # A wrong id would overwrite another request's cache, or the proof in the reserved block.
    if min(blocks) <= RESERVED_BLOCK or max(blocks) >= layout.num_blocks:
        raise ValueError(
            f"sequence {index} of the step names a block outside 1 to {layout.num_blocks - 1}"
        )
    return blocks
