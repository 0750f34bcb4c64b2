"""Who computes attention of prompts on this GPU: tried at the start, before anybody waits.

The trial is the longest chunk, behind another one, with heads, type and block size of the model
that is to be served; numbers are drawn anew, since the pool holds none yet.
"""

from __future__ import annotations

import statistics
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from shared.ops.attention import SequenceSpan
from shared.ops.attention_choice import (
    AttentionChoice,
    AttentionUnavailableError,
    choose_attention,
)
from shared.ops.flash_attention_4 import NAME as FLASH_ATTENTION_4
from shared.ops.flash_attention_4 import load_flash_attention_4
from shared.ops.triton.prefill_attention import (
    MAX_HEAD_DIM,
    is_fast,
    prefill_attention,
    warm_up,
)

if TYPE_CHECKING:
    from torch import Tensor

    from shared.ops.attention_choice import AttentionName, GatheredAttention

LIBRARIES = {FLASH_ATTENTION_4: load_flash_attention_4}

NUM_RUNS = 5
"""The median counts.  Before them comes one that may compile."""

NOT_FAST = f"libraries are for 16-bit numbers and heads of up to {MAX_HEAD_DIM}"

LAYERS_A_RUN = 4
"""Calls behind one another, so that the GPU and not the host is measured."""


def choose_prefill_attention(
    kv_layer: Tensor,
    *,
    num_heads: int,
    max_query_len: int,
    max_context_len: int,
    wanted: AttentionName = "auto",
) -> tuple[GatheredAttention | None, AttentionChoice]:
    """Choose who computes attention, and have compiled what ours need if those are chosen.

    Args:
        kv_layer: A layer of the pool, for its heads, its type and its block size.
        num_heads: Query heads.
        max_query_len: Longest chunk.
        max_context_len: Longest context.
        wanted: What the configuration says.

    Returns:
        See `shared.ops.attention_choice.choose_attention`.

    Raises:
        AttentionUnavailableError: What was asked for by name cannot be used.
    """
    if not is_fast(kv_layer):
        if wanted in LIBRARIES:
            raise AttentionUnavailableError(NOT_FAST)
        return None, AttentionChoice(name="torch", because=NOT_FAST)
    trial = _Trial(kv_layer, num_heads, max_query_len, max_context_len)
    library, choice = choose_attention(wanted, LIBRARIES, trial)
    if library is None:
        warm_up(
            kv_layer,
            num_heads=num_heads,
            max_query_len=max_query_len,
            max_context_len=max_context_len,
        )
    return library, choice


class _Trial:
    """See `shared.ops.attention_choice.Trial`."""

    def __init__(
        self, kv_layer: Tensor, num_heads: int, max_query_len: int, max_context_len: int
    ) -> None:
        self._kv_layer, self._num_heads = kv_layer, num_heads
        self._query_len = min(max_query_len, max_context_len)
        self._context_len = min(2 * self._query_len, max_context_len)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor, SequenceSpan]:
        """Queries, a layer of a pool, and what of it they look at: drawn if anything is tried."""
        _, _, num_kv_heads, block_size, head_dim = self._kv_layer.shape
        num_blocks = -(-self._context_len // block_size)
        device = self._kv_layer.device
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int) -> Tensor:
            numbers = torch.empty(shape, dtype=self._kv_layer.dtype, device=device)
            return numbers.normal_(generator=generator)

        pool = draw(num_blocks, 2, num_kv_heads, block_size, head_dim)
        query = draw(self._query_len, self._num_heads, head_dim)
        span = SequenceSpan(
            query_start=0,
            query_len=self._query_len,
            context_len=self._context_len,
            block_table=torch.arange(num_blocks, device=device),
        )
        return query, pool, span

    def __call__(self, library: GatheredAttention | None) -> tuple[float, Tensor]:
        out = self._attend(library)
        times_ms: list[float] = []
        for _ in range(NUM_RUNS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(LAYERS_A_RUN):
                self._attend(library)
            end.record()
            end.synchronize()
            times_ms.append(begin.elapsed_time(end) / LAYERS_A_RUN)
        return statistics.median(times_ms) * 1e3, out

    def _attend(self, library: GatheredAttention | None) -> Tensor:
        query, pool, span = self._numbers
        return prefill_attention(query, pool, [span], scale=query.shape[2] ** -0.5, library=library)
