"""One held lease: what is copied next, and what may begin behind it."""

from __future__ import annotations

import pytest

from decoded.early_step import EarlyStep
from decoded.held_lease import HeldLease, LeaseState
from decoded.lease_effects import BlockCopy, CopyTimes
from shared.ops.sampling import SamplingParams

TARGETS = [1, 2, 3, 4]


def held(*, early: bool = False) -> HeldLease[str]:
    """Return a lease of which two chunks were announced, each behind an event."""
    lease: HeldLease[str] = HeldLease(
        lease_id=7, slot=0, generation=1, state=LeaseState.RESERVED, targets=list(TARGETS)
    )
    lease.add_sources([21, 22], event=5)
    lease.add_sources([23], event=6)
    if early:
        lease.early = EarlyStep(position=40, sampling=SamplingParams())
    return lease


def next_of(lease: HeldLease[str], max_blocks: int = 8) -> BlockCopy:
    copy = lease.next_copy(max_blocks)
    assert copy is not None
    return copy


def end(lease: HeldLease[str], copy: BlockCopy, *, is_valid: bool = True) -> None:
    lease.copied(copy, CopyTimes(start_ns=1, done_ns=2), is_valid=is_valid)


def test_each_chunk_is_copied_behind_its_own_event() -> None:
    """What is written need not wait for what is not."""
    lease = held()
    copies = []
    while (copy := lease.next_copy(8)) is not None:
        copies.append((copy.sources, copy.targets, copy.event))
        end(lease, copy)
    assert copies == [([21, 22], [1, 2], 5), ([23], [3], 6)]
    assert lease.is_copied


def test_a_lease_has_one_copy_at_a_time_of_no_more_blocks_than_asked() -> None:
    lease = held()
    copy = next_of(lease, max_blocks=1)
    assert (copy.sources, copy.targets) == ([21], [1])
    assert lease.next_copy(8) is None
    assert not lease.is_copied


def test_a_void_copy_has_brought_nothing() -> None:
    lease = held()
    end(lease, next_of(lease), is_valid=False)
    assert lease.num_copied == 0
    assert lease.decline() == TARGETS
    assert lease.next_copy(8) is None


def test_an_adopted_lease_waits_for_no_event() -> None:
    """The first token was read back behind everything that writes the prompt."""
    lease = held()
    lease.adopt("r", blocks=[21, 22, 23, 24], in_place=[])
    copy = next_of(lease)
    assert (copy.sources, copy.event) == ([21, 22, 23, 24], None)


def test_the_early_step_comes_with_the_last_copy_and_once() -> None:
    lease = held(early=True)
    first = next_of(lease)
    end(lease, first)
    last = next_of(lease)
    assert (first.early, last.early) == (None, lease.early)
    end(lease, last)
    assert lease.next_copy(8) is None


def test_an_early_step_over_blocks_that_all_stay_waits_for_what_writes_them() -> None:
    """There is nothing to copy, and what the step reads in place must be written all the same."""
    lease = held(early=True)
    lease.num_copied = len(lease.sources)
    copy = next_of(lease)
    assert (copy.sources, copy.event, copy.early) == ([], 6, lease.early)


def test_a_handoff_that_is_here_needs_no_early_step() -> None:
    lease = held(early=True)
    lease.adopt("r", blocks=[21, 22, 23], in_place=[])
    assert next_of(lease).early is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"generation": 2}, "contradicts what CHUNKs named"),
        ({"total": 5}, "contradicts what CHUNKs named"),
        ({"blocks": [21, 23, 22, 24]}, "contradicts what CHUNKs named"),
        ({"num_tokens": 41}, "contradicts the first token told"),
        ({"first_token": 8}, "contradicts the first token told"),
    ],
)
def test_a_handoff_must_agree_with_all_that_was_said(
    changes: dict[str, int], says: str | None
) -> None:
    lease = held(early=True)
    assert lease.early is not None
    lease.early.token_id = 7
    told = {
        "slot": 0,
        "generation": 1,
        "blocks": [21, 22, 23, 24],
        "total": 4,
        "num_tokens": 40,
        "first_token": 7,
    }
    contradiction = lease.contradiction(**told | changes)  # type: ignore[arg-type]
    assert contradiction == (None if says is None else f"HANDOFF {says}")


def test_copies_on_a_gpu_add_up_and_the_last_is_told_apart() -> None:
    """The last one is what is left to do when the first token is known."""
    lease = held()
    for device_ns in (300, 50):
        lease.copied(next_of(lease), CopyTimes(device_ns=device_ns), is_valid=True)
    lease.adopt("r", blocks=[21, 22, 23], in_place=[])
    pulled = lease.pulled()
    assert (pulled.device_ns, pulled.last_device_ns) == (350, 50)


def test_a_copy_of_nothing_takes_no_gpu_s_time() -> None:
    """It only brings the early step along."""
    lease = held(early=True)
    lease.num_copied = len(lease.sources)
    lease.copied(next_of(lease), CopyTimes(device_ns=7), is_valid=True)
    assert (lease.device_ns, lease.last_device_ns) == (None, None)
