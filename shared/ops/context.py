"""Brings a context out of its blocks and joins attention over its parts: the torch references.

Both serve attention that wants keys and values in one piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shared.ops.errors import ShapeError

if TYPE_CHECKING:
    from torch import Tensor


def gather_context(
    kv_layer: Tensor, block_table: Tensor, context_len: int, *, padded_len: int
) -> Tensor:
    """Copy a sequence's keys and values out of its blocks.

    Args:
        kv_layer: [num_blocks, 2, num_kv_heads, block_size, head_dim], a strided view of the pool.
        block_table: [num_blocks] int64, as many block ids as the context needs.
        context_len: Tokens in them.
        padded_len: Tokens of the result; those behind the context are zero.

    Returns:
        [2, padded_len, num_kv_heads, head_dim], contiguous.

    Raises:
        ShapeError: The blocks do not hold the context, or `padded_len` is less than it.
    """
    check_context_shapes(kv_layer, block_table, context_len, padded_len)
    _, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    blocks = kv_layer.index_select(0, block_table).permute(1, 0, 3, 2, 4)
    tokens = blocks.reshape(2, block_table.shape[0] * block_size, num_kv_heads, head_dim)
    context = kv_layer.new_zeros(2, padded_len, num_kv_heads, head_dim)
    context[:, :context_len] = tokens[:, :context_len]
    return context


def check_context_shapes(
    kv_layer: Tensor, block_table: Tensor, context_len: int, padded_len: int
) -> None:
    """Raise ShapeError unless the arguments of `gather_context` fit together."""
    block_size = kv_layer.shape[3]
    if block_table.shape != (-(-context_len // block_size),) or context_len < 1:
        raise ShapeError(
            f"{[*block_table.shape]} blocks of {block_size} do not fit a context of "
            f"{context_len} tokens"
        )
    if padded_len < context_len:
        raise ShapeError(f"{padded_len} tokens cannot hold a context of {context_len}")


def join_attention(out: Tensor, logs: Tensor, other: Tensor, other_logs: Tensor) -> None:
    """Join attention over two parts of a context; `out` and `logs` become those of both.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous.
        logs: [num_heads, num_tokens] float32, contiguous: the natural logarithm of the sum of each
            softmax.
        other: As `out`, over the other part.
        other_logs: As `logs`.

    Raises:
        ShapeError: A shape is not as above.
    """
    check_join_shapes(out, logs, other, other_logs)
    both = torch.logaddexp(logs, other_logs)
    ours, theirs = (log.sub(both).exp().t().unsqueeze(-1) for log in (logs, other_logs))
    out.copy_(out * ours + other * theirs)
    logs.copy_(both)


def check_join_shapes(out: Tensor, logs: Tensor, other: Tensor, other_logs: Tensor) -> None:
    """Raise ShapeError unless the arguments of `join_attention` fit together."""
    num_tokens, num_heads, _ = out.shape
    if out.shape != other.shape or not logs.shape == other_logs.shape == (num_heads, num_tokens):
        raise ShapeError(
            f"{[*other.shape]} and {[*other_logs.shape]} do not join {[*out.shape]} and "
            f"{[*logs.shape]}"
        )
    if not all(tensor.is_contiguous() for tensor in (out, logs, other, other_logs)):
        raise ShapeError("what is joined must be contiguous")
