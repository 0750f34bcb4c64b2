"""Ten thousand hand-overs between GPUs, with a digest of every block on both sides.

Two processes with decoded's and prefilld's own pool, page, events, leases, mapping and turns; only
the model is left out: a kernel writes random bits instead.
"""

from __future__ import annotations

import dataclasses

import pytest

from tests.gpu.ipc.conftest import ALL_VISIBLE, Place
from tests.support.handovers.plan import BLOCKS_8B, LATE_MS, Plan
from tests.support.handovers.run import run_handovers

pytestmark = pytest.mark.gpu

NUM_HANDOVERS = 10_000
NUM_LATE = 200
"""Hand-overs whose writes are late on purpose."""


def plan_for(place: Place, num_handovers: int) -> Plan:
    maker, taker = place.indices
    return Plan(
        layout=BLOCKS_8B,
        maker_device=maker,
        taker_device=taker,
        num_handovers=num_handovers,
        num_losses=num_handovers // 500,
    )


@pytest.mark.parametrize("place", ALL_VISIBLE[-1:], ids=lambda place: place.name)
def test_ten_thousand_handovers_arrive_block_by_block(place: Place) -> None:
    """While blocks are recycled, prompts end half-way, and all that is lent is taken back."""
    outcome = run_handovers(plan_for(place, NUM_HANDOVERS))
    print(f"\n{place.name}: {outcome}")
    assert outcome.num_handovers >= NUM_HANDOVERS
    assert outcome.num_differing == 0
    assert outcome.num_voided > 0
    assert outcome.num_aborted > 0


@pytest.mark.parametrize("place", ALL_VISIBLE, ids=lambda place: place.name)
def test_late_writes_are_waited_for(place: Place) -> None:
    """A kernel that spins before each write makes every chunk's event late."""
    plan = dataclasses.replace(plan_for(place, NUM_LATE), spin_ms=LATE_MS, num_losses=0)
    outcome = run_handovers(plan)
    print(f"\n{place.name}: {outcome}")
    assert outcome.num_handovers >= NUM_LATE
    assert outcome.num_differing == 0


@pytest.mark.parametrize("place", ALL_VISIBLE, ids=lambda place: place.name)
def test_whoever_does_not_ask_the_event_reads_what_was_there_before(place: Place) -> None:
    """The test of the tests above: without the poll nearly every chunk is read too early."""
    plan = dataclasses.replace(plan_for(place, NUM_LATE), spin_ms=LATE_MS, num_losses=0)
    outcome = run_handovers(dataclasses.replace(plan, reading="without the event"))
    print(f"\n{place.name}: {outcome}")
    assert outcome.num_differing > outcome.num_handovers / 2
