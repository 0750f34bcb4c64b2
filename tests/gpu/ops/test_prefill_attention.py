"""Attention of prompts by cuDNN, FlashAttention and what is installed, against the reference."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from shared.ops.attention import SequenceSpan, paged_attention
from shared.ops.attention_choice import (
    AttentionName,
    AttentionUnavailableError,
    GatheredAttention,
)
from shared.ops.kv_write import write_kv
from shared.ops.triton.prefill_attention import prefill_attention, warm_up
from shared.ops.triton.prefill_choice import LIBRARIES, choose_prefill_attention
from tests.gpu.ops.kernel_checks import MAX_ERROR, relative_error

pytestmark = pytest.mark.gpu

BLOCK_SIZE, NUM_BLOCKS = 16, 600


def installed() -> dict[str, GatheredAttention | None]:
    """Return what there is on this machine, by name; None for what comes with torch."""
    found: dict[str, GatheredAttention | None] = {"torch": None}
    for name, load in LIBRARIES.items():
        with suppress(AttentionUnavailableError):
            found[name] = load()
    return found


INSTALLED = installed()
by_each = pytest.mark.parametrize("library", INSTALLED.values(), ids=INSTALLED.keys())


def check(
    chunks: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    heads: tuple[int, int] = (8, 2),
    head_dim: int = 128,
    library: GatheredAttention | None = None,
) -> None:
    """Attend with chunks of (tokens, tokens before them), over a pool that is NaN elsewhere."""
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    shape = (NUM_BLOCKS, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device="cuda")
    free = torch.randperm(NUM_BLOCKS, device="cuda")
    spans: list[SequenceSpan] = []
    start = 0
    for query_len, before in chunks:
        context_len = query_len + before
        table, free = free.split([-(-context_len // BLOCK_SIZE), len(free) + context_len // -16])
        position = torch.arange(context_len, device="cuda")
        slots = table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        key, value = torch.randn(2, context_len, num_kv_heads, head_dim, device="cuda").to(dtype)
        write_kv(pool[:, 1], key, value, slots)
        spans.append(
            SequenceSpan(
                query_start=start, query_len=query_len, context_len=context_len, block_table=table
            )
        )
        start += query_len
    query = torch.randn(start, num_heads, head_dim, device="cuda").to(dtype)
    out = prefill_attention(query, pool[:, 1], spans, scale=head_dim**-0.5, library=library)
    expected = paged_attention(query.float(), pool.float()[:, 1], spans, scale=head_dim**-0.5)
    assert out.shape == query.shape
    assert relative_error(out, expected) < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 512, 700, 3_000])
@pytest.mark.parametrize("query_len", [1_024, 1_100])
@by_each
def test_long_chunks(
    library: GatheredAttention | None, query_len: int, before: int, dtype: torch.dtype
) -> None:
    """Squares with padding behind and dropped queries before, and pieces of every size."""
    check(((query_len, before),), dtype, library=library)


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 96), ((8, 2), 256)])
@by_each
def test_chunks_of_any_length_in_one_step(
    library: GatheredAttention | None, heads: tuple[int, int], head_dim: int
) -> None:
    """Each takes what suits it: a single token, a short chunk, a long one."""
    chunks = ((1, 0), (1, 77), (37, 0), (200, 33), (1_500, 100))
    check(chunks, torch.bfloat16, heads=heads, head_dim=head_dim, library=library)


def test_float32_stays_exact() -> None:
    """No fast kernel computes it."""
    check(((60, 0), (5, 40)), torch.float32)


def test_everything_that_may_come_is_compiled_ahead() -> None:
    """Without an error for any shape; that nothing is compiled later, cuDNN does not tell."""
    pool = torch.zeros(NUM_BLOCKS, 2, 2, 2, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
    warm_up(pool[:, 0], num_heads=8, max_query_len=1_024, max_context_len=4_096)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_is_installed_can_be_had_by_name(name: AttentionName) -> None:
    """It agrees with ours on the trial's numbers, or this would be refused."""
    pool = torch.zeros(NUM_BLOCKS, 2, 2, 2, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
    library, choice = choose_prefill_attention(
        pool[:, 0],
        num_heads=8,
        max_query_len=1_024,
        max_context_len=4_096,
        wanted=name,
    )
    assert choice.name == name
    assert (library is None) == (name == "torch")


def test_the_choice_is_the_fastest() -> None:
    """Whichever that is here; both figures are told."""
    pool = torch.zeros(NUM_BLOCKS, 2, 2, 2, BLOCK_SIZE, 128, dtype=torch.bfloat16, device="cuda")
    _, choice = choose_prefill_attention(
        pool[:, 0], num_heads=8, max_query_len=1_024, max_context_len=4_096
    )
    measured_us = {"torch": 0.0, **choice.measured_us}
    assert choice.name == min(measured_us, key=measured_us.__getitem__)
    assert measured_us.keys() == INSTALLED.keys()
