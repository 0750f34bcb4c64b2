"""What the tests of the KV pool share."""

from __future__ import annotations

import pytest

from shared.kv.layout import KVLayout


@pytest.fixture
def layout() -> KVLayout:
    """A pool small enough to look at: 8 blocks of 4 tokens, 192 bytes a token."""
    return KVLayout(
        num_blocks=8, num_layers=2, num_kv_heads=3, block_size=4, head_dim=4, dtype="float32"
    )
