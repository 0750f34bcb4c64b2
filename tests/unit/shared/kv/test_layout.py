"""Tests of shared/kv/layout.py."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.kv.errors import LayoutError
from shared.kv.layout import POOL_ALIGNMENT_BYTES, KVLayout

SMOLLM2 = KVLayout(
    num_blocks=1024, num_layers=30, num_kv_heads=3, block_size=16, head_dim=64, dtype="bfloat16"
)
LLAMA_70B = KVLayout(
    num_blocks=256, num_layers=80, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16"
)


def test_bytes_of_a_token_are_those_of_known_models() -> None:
    """Two published shapes hold the arithmetic to something outside this file."""
    assert SMOLLM2.token_bytes == 23_040
    assert LLAMA_70B.token_bytes == 327_680


def test_a_block_holds_its_tokens_and_nothing_else() -> None:
    """A transfer is one run of `block_bytes`."""
    assert SMOLLM2.block_bytes == 16 * 23_040
    assert SMOLLM2.kv_bytes == 1024 * SMOLLM2.block_bytes


def test_four_byte_elements_double_the_pool() -> None:
    """The element's size enters every other size."""
    wide = dataclasses.replace(SMOLLM2, dtype="float32")
    assert wide.block_bytes == 2 * SMOLLM2.block_bytes


def test_shape_puts_the_block_first() -> None:
    """Block-major is what makes a block contiguous."""
    assert SMOLLM2.shape == (1024, 30, 2, 3, 16, 64)


@pytest.mark.parametrize("num_blocks", [2, 3, 1000, 1024])
def test_a_pool_is_whole_huge_pages_and_wastes_less_than_one(num_blocks: int) -> None:
    """A CUDA allocation that is no multiple of 2 MiB may share its handle with neighbours."""
    layout = SMOLLM2.with_num_blocks(num_blocks)
    assert layout.pool_bytes % POOL_ALIGNMENT_BYTES == 0
    assert 0 <= layout.pool_bytes - layout.kv_bytes < POOL_ALIGNMENT_BYTES


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (3000, 188)]
)
def test_tokens_round_up_to_blocks(num_tokens: int, num_blocks: int) -> None:
    """The last block may be partly filled; no token is without one."""
    assert SMOLLM2.num_blocks_for(num_tokens) == num_blocks


def test_a_negative_number_of_tokens_is_refused() -> None:
    """Rounding would turn it into a plausible number of blocks."""
    with pytest.raises(ValueError, match="num_tokens is -1"):
        SMOLLM2.num_blocks_for(-1)


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "block_size", "head_dim"])
def test_each_dimension_of_a_block_changes_the_fingerprint(field: str) -> None:
    """Pools whose blocks differ must not pass each other's hand-shake."""
    changes: dict[str, Any] = {field: getattr(SMOLLM2, field) + 1}
    other = dataclasses.replace(SMOLLM2, **changes)
    assert other.fields() != SMOLLM2.fields()


def test_the_element_type_changes_the_fingerprint() -> None:
    """bfloat16 and float16 have the same size, so only the name tells them apart."""
    other = dataclasses.replace(SMOLLM2, dtype="float16")
    assert other.block_bytes == SMOLLM2.block_bytes
    assert other.fields() != SMOLLM2.fields()


def test_the_number_of_blocks_does_not_change_the_fingerprint() -> None:
    """The daemons' pools may be of different sizes."""
    assert SMOLLM2.with_num_blocks(9).fields() == SMOLLM2.fields()
    assert SMOLLM2.with_num_blocks(9).num_blocks == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0; it must be a positive integer"),
        ({"head_dim": -64}, "head_dim is -64; it must be a positive integer"),
        ({"block_size": 16.0}, r"block_size is 16\.0; it must be a positive integer"),
        ({"num_kv_heads": True}, "num_kv_heads is True; it must be a positive integer"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of"),
        ({"num_blocks": 1}, "num_blocks is 1; it must be 2 to"),
        ({"num_blocks": 1 << 31}, "num_blocks is 2147483648; it must be 2 to"),
        ({"num_layers": 1 << 40, "num_blocks": 1 << 30}, "pool_bytes is .* at most"),
    ],
)
def test_a_shape_that_no_pool_can_have_is_named(change: dict[str, Any], message: str) -> None:
    """The user reads which field of the configuration is at fault."""
    with pytest.raises(LayoutError, match=message) as caught:
        dataclasses.replace(SMOLLM2, **change)
    assert isinstance(caught.value, ConfigError)
