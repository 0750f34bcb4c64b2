"""`shared.daemon.gauges`: what is told of blocks, queues, slots and the link."""

from __future__ import annotations

import math

import pytest

from shared.daemon.gauges import (
    Queue,
    Slots,
    declare_link_gauges,
    declare_pool_gauges,
    declare_queue_gauges,
    declare_slot_gauges,
)
from shared.kv.allocator import BlockAllocator, BlockState
from shared.metrics import Metrics
from tests.support.exposition import Exposition


def test_blocks_are_told_by_state_and_add_up() -> None:
    metrics, allocator = Metrics(), BlockAllocator(10)
    declare_pool_gauges(metrics, allocator, block_bytes=64)
    blocks = allocator.allocate(4)
    allocator.move(blocks[:1], BlockState.LEASED)
    values = Exposition(metrics.exposition())
    states = values.by_label("kvpair_pool_blocks", "state")
    assert states == {
        "reserved": 1, "free": 5, "cached": 0, "active": 3, "leased": 1, "quarantined": 0
    }  # fmt: skip
    assert values["kvpair_pool_capacity_blocks"] == sum(states.values()) == 10
    assert values["kvpair_pool_unaccounted_blocks"] == 0
    assert values["kvpair_pool_block_bytes"] == 64


def test_a_block_in_no_state_is_told() -> None:
    """The invariant is a metric of its own, so that an alert needs no arithmetic."""
    metrics, allocator = Metrics(), BlockAllocator(10)
    declare_pool_gauges(metrics, allocator, block_bytes=64)
    allocator._num[BlockState.FREE] -= 2
    assert Exposition(metrics.exposition())["kvpair_pool_unaccounted_blocks"] == 2


def test_a_queue_tells_the_age_of_its_oldest() -> None:
    metrics = Metrics()
    queues = {"waiting": Queue.since([7.0, 4.5], 10.0), "sent": Queue.since([], 10.0)}
    declare_queue_gauges(metrics, lambda: queues)
    values = Exposition(metrics.exposition())
    assert values['kvpair_queue_requests{queue="waiting"}'] == 2
    assert values['kvpair_queue_oldest_seconds{queue="waiting"}'] == 5.5
    assert values['kvpair_queue_requests{queue="sent"}'] == 0
    assert values['kvpair_queue_oldest_seconds{queue="sent"}'] == 0


@pytest.mark.parametrize(("slots", "share"), [(Slots(reserved=40, used=30), 0.25),
                                              (Slots(reserved=0, used=0), 0.0)])  # fmt: skip
def test_the_share_of_reserved_and_unused_slots(slots: Slots, share: float) -> None:
    metrics = Metrics()
    declare_slot_gauges(metrics, lambda: slots)
    values = Exposition(metrics.exposition())
    assert values["kvpair_reserved_slots_unused_ratio"] == share
    assert values['kvpair_reserved_slots{use="used"}'] == slots.used
    assert values['kvpair_reserved_slots{use="unused"}'] == slots.reserved - slots.used


def test_an_open_link_is_told_in_base_units() -> None:
    metrics = Metrics()
    status = {"state": "open", "rtt_us": 250.0, "bandwidth_gb_s": 8.0}
    declare_link_gauges(metrics, lambda: status)
    values = Exposition(metrics.exposition())
    assert values["kvpair_link_up"] == 1
    assert values["kvpair_link_rtt_seconds"] == pytest.approx(0.00025)
    assert values["kvpair_link_bandwidth_bytes_per_second"] == 8e9


def test_what_is_not_known_of_a_link_is_no_number() -> None:
    """Zero would read as a link without delay."""
    metrics = Metrics()
    declare_link_gauges(metrics, lambda: {"state": "lost", "rtt_us": None})
    values = Exposition(metrics.exposition())
    assert values["kvpair_link_up"] == 0
    assert math.isnan(values["kvpair_link_rtt_seconds"])
