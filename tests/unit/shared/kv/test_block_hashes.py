"""Tests of shared/kv/block_hashes.py."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.block_hashes import HASH_BYTES, block_hashes, root_hash

ROOT = root_hash(fingerprint="a model", epoch=bytes(16))
TOKENS = st.lists(st.integers(0, 2), max_size=12)


def hashes_of(token_ids: list[int], root: bytes = ROOT) -> tuple[bytes, ...]:
    return block_hashes(token_ids, block_size=2, root=root)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 0), (2, 1), (5, 2), (6, 3)])
def test_whole_blocks_alone_have_a_hash(num_tokens: int, num_blocks: int) -> None:
    """A block that is not full yet may still be written."""
    hashes = hashes_of([7] * num_tokens)
    assert len(hashes) == len(set(hashes)) == num_blocks
    assert {len(block_hash) for block_hash in hashes} <= {HASH_BYTES}


@given(first=TOKENS, second=TOKENS)
def test_hashes_are_equal_exactly_where_the_prefixes_are(
    first: list[int], second: list[int]
) -> None:
    """A block's contents depend on every token before it, so its hash does."""
    for index, (ours, theirs) in enumerate(zip(hashes_of(first), hashes_of(second), strict=False)):
        end = 2 * (index + 1)
        assert (ours == theirs) is (first[:end] == second[:end])


def test_a_block_after_another_prefix_has_another_hash() -> None:
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([5, 6, 3, 4])[1]
    assert hashes_of([1, 2, 3, 4])[1] != hashes_of([3, 4])[0]


def test_large_token_ids_are_told_apart() -> None:
    """Each takes the same number of bytes, up to 2^32."""
    assert hashes_of([0, (1 << 32) - 1]) != hashes_of([(1 << 32) - 1, 0])
    with pytest.raises(struct.error, match="format requires"):
        hashes_of([0, 1 << 32])


@pytest.mark.parametrize(
    "root",
    [
        root_hash(fingerprint="another model", epoch=bytes(16)),
        root_hash(fingerprint="a model", epoch=bytes(15) + b"\1"),
    ],
    ids=["model", "epoch"],
)
def test_another_model_or_pool_has_other_hashes(root: bytes) -> None:
    """Its keys and values are others, for the same tokens."""
    assert hashes_of([1, 2], root) != hashes_of([1, 2])
