"""Paged decode attention behind the rotation: split along the context, joined by the last part.

A thread block takes one KV head of one sequence, with all the query heads that share it as rows of
one matrix, over one part of the context.  The grid follows from the batch size and the longest
context that may come; how many of a sequence's parts have work follows, on the device, from its
length.  The part that is done last, by an atomic counter, joins all of them, which saves every
layer another launch.  Rotation and KV write stay a launch of their own: inside this kernel they
would save it, but take registers that cost more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shared.ops.decode_attention import check_decode_shapes
from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair
from shared.ops.rope_kv_write import check_rope_shapes
from shared.ops.triton.decode_attention_kernel import decode_attention_kernel
from shared.ops.triton.launch import Launch, padded
from shared.ops.triton.rope_kv_write import rope_kv_write


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """How a batch is cut.  Constants, so that sums are split alike on every GPU."""

    target_programs: int
    """Thread blocks that a launch aims at.  More shorten a part but lengthen the joining."""
    tile_bytes: int
    """Keys that a thread block loads at once, and as many values."""
    num_warps: int
    joined_elements: int
    """Partial sums that a thread block loads at once while it joins parts: 64 a thread."""


FEW = AttentionPlan(target_programs=264, tile_bytes=32 << 10, num_warps=4, joined_elements=16384)
"""For a batch that leaves multiprocessors idle: what counts is how long a single part takes."""

MANY = AttentionPlan(target_programs=396, tile_bytes=16 << 10, num_warps=2, joined_elements=4096)
"""Three thread blocks for each of the 132 multiprocessors of an H200: few warps leave room for
several at once, which hide each other's waiting."""

MAX_FEW_LANES = 32
"""Up to so many pairs of a sequence and a KV head are few."""

NUM_STAGES = 3
"""Block-table entries are loaded ahead of the keys and values that they lead to."""

MAX_SPLITS = 128
"""More parts would take longer to join than they save.  A power of two, and the only bound that is
compiled in: one compilation serves all batch sizes."""

ALIGNMENT_BYTES = 16
"""Width of a thread's load; every token's row of a head must begin at a multiple."""

LOG2_E = math.log2(math.e)


class DecodeAttention:
    """Attention of up to `max_batch` sequences, with the scratch memory that its parts need.

    One object serves all batch sizes and layers of an engine, on one stream at a time: a launch
    leaves the scratch memory as it found it.

    Args:
        max_batch: Most sequences of a call.
        max_context_len: Longest context of any; with the batch size it fixes the grid.
        num_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: Numbers of a head.
        device: Where it will run.
        plan: How to cut every batch; by default what suits each.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_context_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        plan: AttentionPlan | None = None,
    ) -> None:
        self._max_batch = max_batch
        self._max_context_len = max_context_len
        self._heads = (num_heads, num_kv_heads, head_dim)
        self._plan = plan
        num_parts = max(batch * self.num_splits(batch) for batch in range(1, max_batch + 1))
        num_rows = num_parts * num_heads
        self._sums = torch.empty(num_rows * head_dim, dtype=torch.float32, device=device)
        self._logs = torch.empty(num_rows, dtype=torch.float32, device=device)
        self._counters = torch.zeros(max_batch * num_kv_heads, dtype=torch.int32, device=device)

    def plan(self, batch: int) -> AttentionPlan:
        """Return how a batch of this size is cut."""
        if self._plan is not None:
            return self._plan
        return FEW if batch * self._heads[1] <= MAX_FEW_LANES else MANY

    def num_splits(self, batch: int) -> int:
        """Return into how many parts the longest context of a batch of this size is cut."""
        _, num_kv_heads, head_dim = self._heads
        plan = self.plan(batch)
        wanted = -(-plan.target_programs // (batch * num_kv_heads))
        # Parts of less than a tile would be empty.  float32 has the smallest tiles.
        longest = -(-self._max_context_len // _tile_tokens(plan, head_dim, 4))
        return max(1, min(wanted, longest, MAX_SPLITS))

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        slot_mapping: Tensor,
        pools: PoolPair,
        block_tables: Tensor,
        context_lens: Tensor,
        *,
        layer: int,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        """Rotate, write and attend with one token a sequence; see `shared.ops.decode_step`.

        What of block tables, lengths and older keys and values it reads is nobody's output in the
        same step, so it begins to read them while the launch ahead still runs.

        Raises:
            ShapeError: As there, or the call is not what the object was made for.
        """
        num_heads = check_rope_shapes(qkv, pools.own[:, layer], slot_mapping)
        check_decode_shapes(qkv[:, :num_heads], pools, block_tables, context_lens)
        batch, _, head_dim = qkv.shape
        num_kv_heads, block_size = pools.own.shape[3:5]
        if batch > self._max_batch or (num_heads, num_kv_heads, head_dim) != self._heads:
            raise ShapeError(
                f"{batch} sequences of {num_heads} over {num_kv_heads} heads of {head_dim} do not "
                f"fit scratch memory for {self._max_batch} of {self._heads}"
            )
        item_bytes = qkv.element_size()
        if head_dim * item_bytes % ALIGNMENT_BYTES:
            raise ShapeError(f"a head of {head_dim} {qkv.dtype} is no multiple of 16 bytes")
        if block_tables.stride(1) != 1:
            raise ShapeError("rows of block tables must be contiguous")
        query = rope_kv_write(qkv, cos, sin, pools.own[:, layer], slot_mapping)
        out = torch.empty_like(query)
        plan, num_splits = self.plan(batch), self.num_splits(batch)
        group = num_heads // num_kv_heads
        padded_dim = padded(head_dim)
        joined_group = padded(group)
        block_stride, layer_stride, kv_stride, head_stride = pools.own.stride()[:4]
        _DECODE_ATTENTION(
            (num_kv_heads, num_splits, batch),
            out,
            query,
            pools.bases,
            block_tables,
            context_lens,
            self._sums,
            self._logs,
            self._counters,
            layer,
            scale * LOG2_E,
            query.stride(0),
            query.stride(1),
            block_tables.stride(0),
            BLOCK_STRIDE=block_stride,
            LAYER_STRIDE=layer_stride,
            KV_STRIDE=kv_stride,
            HEAD_STRIDE=head_stride,
            BLOCK_SIZE=block_size,
            ITEM_BYTES=item_bytes,
            GROUP=group,
            # The matrix units take no fewer than 16 rows.
            PADDED_GROUP=max(16, padded(group)),
            HEAD_DIM=head_dim,
            PADDED_DIM=padded_dim,
            TILE=_tile_tokens(plan, head_dim, item_bytes),
            MAX_SPLITS=MAX_SPLITS,
            JOINED_GROUP=joined_group,
            JOINED_PARTS=max(1, plan.joined_elements // (joined_group * padded_dim)),
            WINDOW=window or 0,
            num_warps=plan.num_warps,
            num_stages=NUM_STAGES,
        )
        return out


def _tile_tokens(plan: AttentionPlan, head_dim: int, item_bytes: int) -> int:
    """Return how many tokens a thread block loads at once; the matrix units take at least 16."""
    return max(16, plan.tile_bytes // (padded(head_dim) * item_bytes))


_DECODE_ATTENTION = Launch(decode_attention_kernel)
