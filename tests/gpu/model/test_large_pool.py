"""A request at the bottom and at the top of pools that 31 bits do not address.

One process has both daemons' engines on one GPU; `tests/support/pool_ends.py` says why.
"""

from __future__ import annotations

import pytest

from tests.support.gpus import device_index, pair_devices
from tests.support.pool_ends import BothEngines, check_both_ends

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_PROMPT_TOKENS = 1000


def test_behind_2_to_the_31_elements_every_bit_is_the_same() -> None:
    """Prefill, pull, graphs and reading in place: a 32-bit offset would wrap in any of them."""
    engines = BothEngines(
        model="random:llama-3.1-8b",
        dtype="bfloat16",
        device=device_index(pair_devices()[0]),
        num_elements=1 << 31,
        num_prompt_tokens=NUM_PROMPT_TOKENS,
    )
    bottom, top = check_both_ends(engines)
    assert len(set(bottom.ids)) > 1
    print(f"\nblocks {bottom.targets[0]}-{bottom.targets[-1]}, {top.targets[0]}-{top.targets[-1]}")
