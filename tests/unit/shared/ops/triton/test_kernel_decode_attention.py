"""Paged decode attention against its reference, over two pools full of NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair
from tests.gpu.ops.kernel_checks import (
    Attention,
    attention_inputs,
    check_decode_attention,
    kernel_for,
)

SMALL = {"num_kv_heads": 2, "block_size": 8, "head_dim": 16}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 20])
def test_any_number_of_query_heads_shares_a_kv_head(group: int) -> None:
    """Rows that pad a group to the matrix units' size would be the next KV head's."""
    check_decode_attention(Attention(context_lens=(9,), group=group, **SMALL), "cpu")


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 192, 256])
def test_head_dims_need_not_be_powers_of_two(head_dim: int) -> None:
    """Columns that pad a head would be the next token's."""
    case = Attention(context_lens=(35, 4), head_dim=head_dim, num_kv_heads=1)
    check_decode_attention(case, "cpu")


# The interpreter keeps bfloat16 as integers and multiplies those, so bfloat16 is for `tests/gpu`.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_of_a_context_join_to_the_whole(dtype: torch.dtype) -> None:
    """One, two and many parts, a padding row, and contexts that end at each border of a block."""
    case = Attention(
        context_lens=(600, 0, 257, 256, 1, 8, 7), dtype=dtype, group=2, num_kv_heads=1, head_dim=16
    )
    assert kernel_for(case, "cpu").num_splits(len(case.context_lens)) > 1
    check_decode_attention(case, "cpu")


def test_blocks_of_any_size_are_followed() -> None:
    """A tile then begins and ends within blocks."""
    case = Attention(context_lens=(300, 11), block_size=5, head_dim=32, num_kv_heads=1)
    check_decode_attention(case, "cpu")


@pytest.mark.parametrize("window", [1, 7, 100, 1_000])
def test_a_token_sees_no_farther_than_its_window(window: int) -> None:
    """Windows within a block, over several parts, and longer than every context."""
    case = Attention(
        context_lens=(400, 0, 8, 1), group=2, num_kv_heads=1, head_dim=16, window=window
    )
    check_decode_attention(case, "cpu")


def test_a_new_peer_is_read_without_a_new_tensor_of_addresses() -> None:
    """A captured graph keeps the tensor: only what is in it may change with an epoch."""
    case = Attention(context_lens=(20,), **SMALL)
    inputs, kernel = attention_inputs(case, "cpu"), kernel_for(case, "cpu")
    assert (inputs.block_tables[0, :2] < 0).any(), "nothing of it is in the peer's pool"
    pools, moved = inputs.pools, inputs.pools.peer.clone()
    expected = kernel(*vars(inputs).values(), layer=1, scale=0.25)
    pools.peer.fill_(float("nan"))
    inputs = replace(inputs, pools=pools.with_peer(moved))
    assert inputs.pools.bases is pools.bases
    assert torch.equal(kernel(*vars(inputs).values(), layer=1, scale=0.25), expected)


def test_what_does_not_fit_is_refused() -> None:
    """A kernel would read beside its tensors and say nothing."""
    case = Attention(context_lens=(20,), **SMALL)
    inputs, kernel = attention_inputs(case, "cpu"), kernel_for(case, "cpu")
    pools = inputs.pools

    def call(**changes: object) -> None:
        kernel(*vars(replace(inputs, **changes)).values(), layer=0, scale=1.0)  # type: ignore[arg-type]

    with pytest.raises(ShapeError, match="7 query heads cannot share 2"):
        call(qkv=inputs.qkv[:, :11])
    with pytest.raises(ShapeError, match=r"block_tables must be int32.*int64"):
        call(block_tables=inputs.block_tables.long())
    with pytest.raises(ShapeError, match="do not fit scratch memory for 1"):
        call(qkv=inputs.qkv[:, :6].contiguous())
    with pytest.raises(ShapeError, match="heads of 16 hold no keys and values"):
        call(pools=PoolPair.of(pools.own[..., :2].contiguous()))
    with pytest.raises(ShapeError, match="cannot stand beside"):
        PoolPair.of(pools.own, pools.own[..., :2].contiguous())
