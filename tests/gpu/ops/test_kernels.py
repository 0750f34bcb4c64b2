"""Every kernel against its reference on a GPU, in every dtype, and above 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.ops.pool_pair import PoolPair, peer_entries
from tests.gpu.ops.kernel_checks import (
    Attention,
    AttentionInputs,
    attention_inputs,
    check_argmax,
    check_context,
    check_decode_attention,
    check_gather_blocks,
    check_gemv,
    check_norm,
    check_rope_kv_write,
    check_rotary_angles,
    check_silu_mul,
    check_skinny,
    kernel_for,
)

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
def test_attention_of_any_head_dim(head_dim: int, dtype: torch.dtype) -> None:
    """Long and short contexts in one batch, a padding row, NaN behind and between."""
    lengths = (1_500, 0, 257, 1, 16, 4_000)
    check_decode_attention(Attention(context_lens=lengths, head_dim=head_dim, dtype=dtype), "cuda")


@pytest.mark.parametrize("group", [1, 2, 3, 5, 6, 7, 8, 16, 20])
def test_attention_of_any_group(group: int) -> None:
    """Qwen2-7B has 7 query heads a KV head, SmolLM2 3."""
    case = Attention(context_lens=(900, 33), group=group, dtype=torch.bfloat16)
    check_decode_attention(case, "cuda")


@pytest.mark.parametrize("block_size", [1, 5, 32, 128])
def test_attention_over_blocks_of_any_size(block_size: int) -> None:
    """A tile is part of a block or covers many."""
    case = Attention(context_lens=(900, 33), block_size=block_size, dtype=torch.bfloat16)
    check_decode_attention(case, "cuda")


@pytest.mark.parametrize("window", [1, 100, 1_024, 5_000])
def test_attention_within_a_window(window: int) -> None:
    """Within a block, over several parts, and longer than every context."""
    case = Attention(context_lens=(4_000, 0, 900, 1), window=window, dtype=torch.bfloat16)
    check_decode_attention(case, "cuda")


def test_many_launches_in_a_row_give_the_same_bits() -> None:
    """Parts are counted and joined by whichever comes last: a race would move the result."""
    case = Attention(context_lens=(4_000, 17, 900), num_kv_heads=8, dtype=torch.bfloat16)
    inputs, kernel = attention_inputs(case, "cuda"), kernel_for(case, "cuda")
    expected = kernel(*vars(inputs).values(), layer=1, scale=0.125)
    results = [kernel(*vars(inputs).values(), layer=1, scale=0.125) for _ in range(2_000)]
    assert all(torch.equal(result, expected) for result in results)


def test_a_captured_graph_follows_the_tables_and_the_peer() -> None:
    """Longer contexts, other blocks and a peer that lies elsewhere, without a new capture."""
    case = Attention(context_lens=(3_000, 500), dtype=torch.bfloat16)
    first = attention_inputs(case, "cuda")
    second = attention_inputs(replace(case, context_lens=(2_100, 2_999)), "cuda")
    kernel = kernel_for(case, "cuda")
    kernel(*vars(first).values(), layer=1, scale=0.125)  # compiled before capture
    held = AttentionInputs(
        qkv=first.qkv.clone(),
        cos=first.cos.clone(),
        sin=first.sin.clone(),
        slot_mapping=first.slot_mapping.clone(),
        pools=PoolPair.of(first.pools.own.clone(), first.pools.peer.clone()),
        block_tables=torch.zeros_like(first.block_tables),
        context_lens=first.context_lens.clone(),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernel(*vars(held).values(), layer=1, scale=0.125)
    for inputs in (first, second, first):
        # A new epoch: the same own pool, the peer elsewhere.
        held.pools.own.copy_(inputs.pools.own)
        held.pools.with_peer(inputs.pools.peer)
        for name in ("qkv", "cos", "sin", "slot_mapping", "context_lens"):
            getattr(held, name).copy_(getattr(inputs, name))
        width = min(held.block_tables.shape[1], inputs.block_tables.shape[1])
        held.block_tables[:, :width] = inputs.block_tables[:, :width]
        graph.replay()
        assert torch.equal(out, kernel(*vars(inputs).values(), layer=1, scale=0.125))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_kv_write(dtype: torch.dtype) -> None:
    """Of the 8B shape, and of odd ones."""
    check_rope_kv_write(dtype, "cuda", heads=(32, 8), head_dim=128)
    check_rope_kv_write(dtype, "cuda", heads=(9, 3), head_dim=80)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [576, 4_096, 8_192, 16_384])
def test_norms(width: int, dtype: torch.dtype) -> None:
    """Rows of one warp up to sixteen."""
    check_norm(dtype, "cuda", width=width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1_100, 14_336])
def test_gates(width: int, dtype: torch.dtype) -> None:
    """The last thread block of a row is full or not."""
    check_silu_mul(dtype, "cuda", width=width)


@pytest.mark.parametrize("num_programs", [1, 4, 132])
def test_gathered_blocks(num_programs: int) -> None:
    """Fewer thread blocks than pieces, and more."""
    check_gather_blocks(torch.bfloat16, "cuda", num_programs=num_programs)


def test_angles_are_the_reference_s() -> None:
    """One launch instead of eight."""
    check_rotary_angles("cuda")


def test_the_largest_of_a_row() -> None:
    """Of the largest vocabulary that is served."""
    check_argmax("cuda", width=128_256)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_one_row(dtype: torch.dtype) -> None:
    """Outputs that fill no thread block, and every prologue and epilogue."""
    check_gemv(dtype, "cuda", width=4_096, num_outputs=1_004)


@pytest.mark.parametrize("num_rows", [2, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_few_rows(dtype: torch.dtype, num_rows: int) -> None:
    """Fewer rows than the matrix units take, and as many as go."""
    check_skinny(dtype, "cuda", num_rows=num_rows, width=1_024, num_outputs=1_004)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_leave_their_blocks_and_parts_join(dtype: torch.dtype) -> None:
    """What lies behind a context's last token never reaches a product."""
    check_context(dtype, "cuda")


def test_the_top_of_a_large_pool_is_as_good_as_its_bottom() -> None:
    """Beyond 2^31 elements 32-bit offsets wrap, and a wrapped read raises nothing.

    A request's blocks are written at the bottom, gathered to the top, read through both pools of a
    pair; and KV written through slots of the top equals what was written at the bottom.
    """
    from shared.ops.triton.gather_blocks import gather_blocks
    from shared.ops.triton.rope_kv_write import rope_kv_write

    shape = (1_100, 80, 2, 8, 16, 128)  # 70B: 2,621,440 elements a block
    pool = torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda")
    assert pool.numel() > 2**31
    num_tokens, num_blocks, layer = 300, 19, 79
    bottom = torch.arange(1, num_blocks + 1, device="cuda")
    top = shape[0] - 1 - bottom
    pool[bottom] = torch.randn((num_blocks, *shape[1:]), device="cuda").bfloat16()
    gather_blocks(pool, pool, bottom, top, num_programs=16)
    assert torch.equal(pool[top].view(torch.int16), pool[bottom].view(torch.int16))

    qkv = torch.randn(num_tokens, 80, 128, device="cuda").bfloat16()
    angles = torch.randn(num_tokens, 1, 128, device="cuda")
    position = torch.arange(num_tokens, device="cuda")
    for ids in (bottom, top):
        slots = ids[position // 16] * 16 + position % 16
        query = rope_kv_write(qkv, angles, angles, pool[:, layer], slots)
    assert torch.equal(pool[top].view(torch.int16), pool[bottom].view(torch.int16))
    assert not torch.equal(query, qkv[:, :64])

    case = Attention(context_lens=(num_tokens,), group=8, num_kv_heads=8, head_dim=128)
    kernel, pools = kernel_for(case, "cuda"), PoolPair.of(pool)
    lengths = torch.tensor([num_tokens], dtype=torch.int32, device="cuda")
    newest = slice(num_tokens - 1, num_tokens)
    results = []
    for ids in (bottom, top):
        for is_peer in (False, True):
            tables = ids.int().unsqueeze(0)
            if is_peer:  # all but the block that the newest token is written to
                tables = torch.cat([peer_entries(tables[:, :-1]), tables[:, -1:]], 1)
            slots = ids[position // 16] * 16 + position % 16
            results.append(
                kernel(
                    qkv[newest],
                    angles[newest],
                    angles[newest],
                    slots[newest],
                    pools,
                    tables,
                    lengths,
                    layer=layer,
                    scale=0.1,
                )
            )
    assert not results[0].isnan().any()
    assert all(torch.equal(result, results[0]) for result in results)
    assert torch.equal(pool[top].view(torch.int16), pool[bottom].view(torch.int16))
