"""Hand-overs between two processes over the memfd, with a digest of every block on both sides.

`tests/gpu/ipc/test_handovers.py` runs the same between GPUs.
"""

from __future__ import annotations

import dataclasses

from shared.kv.layout import KVLayout
from tests.support.handovers.plan import Plan
from tests.support.handovers.run import run_handovers

PLAN = Plan(
    layout=KVLayout(
        num_blocks=300, num_layers=2, num_kv_heads=2, block_size=16, head_dim=16, dtype="float32"
    ),
    maker_device=None,
    taker_device=None,
    num_handovers=400,
    num_losses=8,
)


def test_every_block_arrives_as_it_was_written() -> None:
    """While blocks are recycled, prompts end half-way, and all that is lent is taken back."""
    outcome = run_handovers(PLAN)
    print(f"\n{outcome}")
    assert outcome.num_handovers >= PLAN.num_handovers
    assert outcome.num_differing == 0
    assert outcome.num_voided >= PLAN.num_losses, "each loss overtook a hand-off"
    assert outcome.num_aborted > 0


def test_whoever_does_not_look_at_the_generation_reads_what_came_after() -> None:
    """The test of the test above."""
    outcome = run_handovers(dataclasses.replace(PLAN, reading="without the generation"))
    assert outcome.num_differing >= PLAN.num_losses
    assert outcome.num_voided == 0
