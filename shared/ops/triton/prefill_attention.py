"""Attention of prompts on a GPU, by the kernels that are in torch.

Those want keys and values in one piece, so the context is gathered first, which costs a few percent
of the attention over it.  Then

*   long chunks go to cuDNN, the fastest there is on Hopper.  It compiles for every shape (some
    70 ms) and its causal mask begins at the first key, so a chunk becomes a square over its own
    tokens, padded to a multiple of 256 or 512, and the context before it is cut into pieces of
    512 times a power of two.  So there are few shapes, and `warm_up` can compile them all;
*   short ones go to torch's FlashAttention, which takes any shape;
*   what neither takes (float32, wide heads) goes to the reference.

Where a library's kernels are chosen (`prefill_choice.py`), they take all of the first two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.triton.context import gather_context, join_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from shared.ops.attention_choice import GatheredAttention

UNIT = 512
"""Tokens of the smallest piece."""

SQUARE_UNIT, LARGE_UNIT = 256, 512
"""Squares are multiples of so many tokens: half of it is computed in vain, on average."""

MAX_SMALL_SQUARE = 2048
"""Above, squares are multiples of the larger unit, which halves what there is to compile."""

MIN_SQUARE = 1024
"""Chunks of fewer tokens take FlashAttention: padding would cost more than cuDNN saves."""

MAX_HEAD_DIM = 128
"""Of cuDNN's and FlashAttention's fast kernels."""


def prefill_attention(
    query: Tensor,
    kv_layer: Tensor,
    spans: Sequence[SequenceSpan],
    *,
    scale: float,
    peer_layer: Tensor | None = None,
    library: GatheredAttention | None = None,
) -> Tensor:
    """Return causal attention of every query; see `shared.ops.attention.paged_attention`.

    A library, where there is one, computes instead of cuDNN and torch's FlashAttention.

    Raises:
        ShapeError: As there.
    """
    is_special = any(span.window is not None or span.num_in_place for span in spans)
    if is_special or not is_fast(kv_layer):
        return paged_attention(query, kv_layer, spans, scale=scale, peer_layer=peer_layer)
    outputs: list[Tensor] = []
    for span in spans:
        rows = query[span.query_start : span.query_start + span.query_len]
        if library is not None:
            outputs.append(_attend_gathered(rows, kv_layer, span, scale, library))
        elif span.query_len >= MIN_SQUARE:
            outputs.append(_attend_square(rows, kv_layer, span, scale))
        else:
            outputs.append(_attend_gathered(rows, kv_layer, span, scale, _flash_attention))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def is_fast(kv_layer: Tensor) -> bool:
    """Whether there are kernels for a pool of this type and head size."""
    head_dim = kv_layer.shape[4]
    return kv_layer.dtype is not torch.float32 and head_dim <= MAX_HEAD_DIM and not head_dim % 8


def warm_up(kv_layer: Tensor, *, num_heads: int, max_query_len: int, max_context_len: int) -> None:
    """Have cuDNN compile every shape that may come, on the thread that will use them.

    Args:
        kv_layer: A layer of the pool, for its heads and its type.
        num_heads: Query heads.
        max_query_len: Longest chunk.
        max_context_len: Longest context.
    """
    num_kv_heads, head_dim = kv_layer.shape[2], kv_layer.shape[4]
    longest = _rounded_up(max_query_len + UNIT - 1)
    if not is_fast(kv_layer) or max_query_len < MIN_SQUARE:
        return
    pieces = [UNIT << power for power in range(max_context_len.bit_length())]
    pieces = [piece for piece in pieces if piece < max_context_len]
    context = kv_layer.new_zeros(2, max(longest, *pieces, 0), num_kv_heads, head_dim)
    for square in sorted({*map(_rounded_up, range(MIN_SQUARE, longest + 1, SQUARE_UNIT))}):
        query = kv_layer.new_zeros(square, num_heads, head_dim)
        _cudnn(query, context[:, :square], is_causal=True, scale=1.0)
        for piece in pieces:
            _cudnn(query, context[:, :piece], is_causal=False, scale=1.0)


def _attend_gathered(
    query: Tensor,
    kv_layer: Tensor,
    span: SequenceSpan,
    scale: float,
    attend: GatheredAttention,
) -> Tensor:
    """Attend in one call over the whole context."""
    context = gather_context(
        kv_layer, span.block_table, span.context_len, padded_len=span.context_len
    )
    return attend(query, context, scale)


def _flash_attention(query: Tensor, context: Tensor, scale: float) -> Tensor:
    """Attend by torch's FlashAttention, whose causal mask ends with the last query and key."""
    key, value = context.unsqueeze(1)
    attended, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001  no public name
        query.unsqueeze(0),
        key,
        value,
        None,
        None,
        query.shape[0],
        context.shape[1],
        0.0,
        True,
        False,
        scale=scale,
    )
    out: Tensor = attended
    return out.squeeze(0)


def _attend_square(query: Tensor, kv_layer: Tensor, span: SequenceSpan, scale: float) -> Tensor:
    """Attend by cuDNN, piece by piece.

    What of the earlier context fills no whole unit joins the square, as keys whose queries are
    computed and dropped.
    """
    before = span.context_len - span.query_len
    num_dropped = before % UNIT
    first = before - num_dropped
    square = _rounded_up(num_dropped + span.query_len)
    context = gather_context(
        kv_layer, span.block_table, span.context_len, padded_len=first + square
    )
    if square > span.query_len:
        behind = square - num_dropped - span.query_len
        query = functional.pad(query, (0, 0, 0, 0, num_dropped, behind))
    attended, logs = _cudnn(query, context[:, first:], is_causal=True, scale=scale)
    for start, length in _pieces(first):
        join_attention(
            attended,
            logs,
            *_cudnn(query, context[:, start : start + length], is_causal=False, scale=scale),
        )
    return attended[num_dropped : num_dropped + span.query_len]


def _cudnn(
    query: Tensor, context: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention like `query`, and [num_heads, num_queries] logarithms of its sums."""
    key, value = context.transpose(1, 2).unsqueeze(1)
    attended, logs, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        query.transpose(0, 1).unsqueeze(0),
        key,
        value,
        None,
        True,
        0.0,
        is_causal,
        False,
        scale=scale,
    )
    return attended.squeeze(0).transpose(0, 1).contiguous(), logs.view(query.shape[1], -1)


def _pieces(length: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of powers of two times `UNIT` that make up a multiple of it."""
    start = 0
    while start < length:
        piece = UNIT << ((length - start) // UNIT).bit_length() - 1
        yield start, piece
        start += piece


def _rounded_up(length: int) -> int:
    unit = SQUARE_UNIT if length <= MAX_SMALL_SQUARE else LARGE_UNIT
    return -(-length // unit) * unit
