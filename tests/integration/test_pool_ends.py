"""A request at the bottom and at the top of its pools, on the CPU.

`tests/gpu/model/test_large_pool.py` has pools of more than 2^31 elements.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pool_ends import BothEngines, check_both_ends


@pytest.mark.parametrize("num_prompt_tokens", [100, 96, 600])
def test_where_blocks_lie_changes_no_bit(tiny_model: Path, num_prompt_tokens: int) -> None:
    """Pulled and in place; the last block partly filled, and whole; in one chunk and in three."""
    engines = BothEngines(
        model=str(tiny_model),
        dtype="float32",
        device=None,
        num_elements=1 << 20,
        num_prompt_tokens=num_prompt_tokens,
    )
    bottom, _ = check_both_ends(engines)
    assert len(set(bottom.ids)) > 1
