"""Lent blocks: revoked before anybody may write them, and given back once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from prefilld.clients import Client
from prefilld.lending import LINK_LOST, Lending
from prefilld.metrics import PrefillMetrics
from prefilld.request import Request
from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.control_page import ControlPage
from shared.kv.holds import BlockHolds
from shared.kv.leases import LeaseTable
from shared.logs import get_logger
from shared.metrics import Metrics
from tests.unit.prefilld.recorders import BLOCK_SIZE, FencedAllocator, new_request

NUM_SLOTS = 2
NOBODY = cast("Client", SimpleNamespace())  # lending never looks at a request's connection


class Listener:
    """Keeps what it was told, in order, with the state of the blocks at that time."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def send_abort(self, lease_id: int) -> None:
        self.told.append(("abort", lease_id))

    def blocks_freed(self) -> None:
        self.told.append(("freed",))

    def adopted(self, request: Request) -> None:
        self.told.append(("adopted", request.id))

    def returned(self, request: Request, cause: str, message: str) -> None:
        self.told.append(("returned", request.id, cause, message))


class World:
    """A lending desk over real books and a real control page."""

    def __init__(self) -> None:
        self.page = ControlPage.create(NUM_SLOTS)
        self.allocator = FencedAllocator(12, self.page)
        self.holds = BlockHolds(self.allocator, block_size=BLOCK_SIZE)
        self.listener = Listener()
        self.metrics = Metrics()
        self.lending = Lending(
            leases=LeaseTable(NUM_SLOTS),
            holds=self.holds,
            control_page=self.page,
            log=get_logger(),
            metrics=PrefillMetrics(self.metrics),
            listener=self.listener,
        )
        self.request = new_request(NOBODY)
        self.request.hold = self.holds.take(self.request.num_tokens)

    def states(self) -> set[BlockState]:
        return {self.allocator.state(block) for block in self.request.blocks}

    def sent(self) -> int:
        """Lend the request's blocks and hand it over; return the lease's id."""
        lease = self.lending.lend(self.request)
        self.lending.handoff_sent(lease)
        return lease.lease_id


@pytest.fixture
def world() -> Iterator[World]:
    with capture_logs():
        world = World()
        yield world
    world.holds.check_integrity()
    world.page.close()


def test_lent_blocks_are_readable_under_the_generation_on_the_page(world: World) -> None:
    lease = world.lending.lend(world.request)
    assert world.page.read(lease.slot) == lease.generation
    assert lease.generation % 2 == 1
    assert lease.blocks == tuple(world.request.blocks)
    assert world.states() == {BlockState.LEASED}
    assert world.lending.requests == (world.request,)


def test_a_request_has_one_lease_however_often_it_is_lent(world: World) -> None:
    """CHUNKs and the HANDOFF name the same one."""
    first = world.lending.lend(world.request)
    world.lending.chunk_sent(first)
    again = world.lending.lend(world.request)
    assert (again.lease_id, again.generation) == (first.lease_id, first.generation)


def test_release_revokes_then_frees_then_tells(world: World) -> None:
    """`FencedAllocator` refuses to free what can still be read."""
    lease_id = world.sent()
    world.lending.on_adopt(lease_id)
    assert world.lending.requests == ()
    assert world.states() == {BlockState.LEASED}
    world.lending.on_release(lease_id)
    assert world.states() == {BlockState.FREE}
    assert world.allocator.num_checked == 1
    assert world.page.read(0) == 2
    assert world.listener.told == [("adopted", "r"), ("freed",)]


def test_a_rejected_request_gets_its_blocks_back_under_no_lease(world: World) -> None:
    world.request.chunked_blocks, world.request.is_reserved = 2, True
    lease_id = world.sent()
    world.lending.on_reject(lease_id, "no-room", "full")
    assert world.states() == {BlockState.ACTIVE}
    assert world.allocator.num_checked == 1
    assert world.listener.told == [("returned", "r", "no-room", "full")]
    request = world.request
    assert (request.lease_id, request.chunked_blocks, request.is_reserved) == (None, 0, False)
    assert world.lending.requests == ()
    again = world.lending.lend(request)
    assert again.lease_id == lease_id + 1


def test_an_adopt_after_a_reject_changes_nothing_and_is_counted(world: World) -> None:
    lease_id = world.sent()
    world.lending.on_reject(lease_id, "no-room", "full")
    world.lending.on_adopt(lease_id)
    assert world.listener.told == [("returned", "r", "no-room", "full")]
    series = 'kvpair_lease_messages_ignored_total{kind="adopt"}'
    assert world.metrics.snapshot()[series] == 1


def test_a_second_release_frees_nothing(world: World) -> None:
    lease_id = world.sent()
    world.lending.on_adopt(lease_id)
    world.lending.on_release(lease_id)
    world.lending.on_release(lease_id)
    assert world.listener.told.count(("freed",)) == 1


def test_a_request_that_was_never_lent_is_freed_at_once(world: World) -> None:
    world.lending.take_back(world.request)
    assert world.states() == {BlockState.FREE}
    assert world.listener.told == [("freed",)]


def test_an_announced_request_is_freed_only_when_decoded_has_released_it(world: World) -> None:
    """It may be pulling: ABORT asks, RELEASE answers."""
    lease = world.lending.lend(world.request)
    world.lending.chunk_sent(lease)
    world.lending.take_back(world.request)
    assert world.states() == {BlockState.LEASED}
    assert world.listener.told == [("abort", lease.lease_id)]
    world.lending.on_release(lease.lease_id)
    assert world.states() == {BlockState.FREE}


def test_an_adopt_that_crossed_an_abort_adopts_nobody(world: World) -> None:
    """The request was taken back, so there is no connection to give away."""
    lease_id = world.sent()
    world.lending.take_back(world.request)
    world.lending.on_adopt(lease_id)
    assert world.listener.told == [("abort", lease_id)]
    world.lending.on_release(lease_id)
    assert world.states() == {BlockState.FREE}


def test_nochunk_ends_the_reservation_and_keeps_the_lease(world: World) -> None:
    lease = world.lending.lend(world.request)
    world.lending.chunk_sent(lease)
    world.request.is_reserved = True
    world.lending.on_nochunk(lease.lease_id)
    assert not world.request.is_reserved
    assert world.lending.lend(world.request).lease_id == lease.lease_id


def test_a_nochunk_about_a_lease_that_ended_is_ignored(world: World) -> None:
    world.lending.on_nochunk(99)
    assert world.listener.told == []


# --- the link's fate -------------------------------------------------------------------------


def test_what_was_not_adopted_comes_back_when_the_link_is_lost(world: World) -> None:
    world.sent()
    world.lending.link_lost(peer_is_gone=False, now_s=0, grace_s=10)
    assert world.states() == {BlockState.ACTIVE}
    assert world.allocator.num_checked == 1
    assert world.listener.told == [("returned", "r", LINK_LOST, "")]


@pytest.fixture
def adopted(world: World) -> int:
    """A lease of which decoded may be reading."""
    lease_id = world.sent()
    world.lending.on_adopt(lease_id)
    world.listener.told.clear()
    return lease_id


def test_what_a_peer_in_doubt_reads_is_revoked_and_kept_from_everybody(
    world: World, adopted: int
) -> None:
    world.lending.link_lost(peer_is_gone=False, now_s=5, grace_s=10)
    assert world.states() == {BlockState.QUARANTINED}
    assert world.page.read(0) == 2
    world.lending.expire(14.9)
    assert world.states() == {BlockState.QUARANTINED}
    assert world.listener.told == []
    world.lending.expire(15)
    assert world.states() == {BlockState.FREE}
    assert world.listener.told == [("freed",)]
    world.lending.on_release(adopted)
    assert world.listener.told == [("freed",)]


def test_quarantine_ends_when_the_peer_is_proved_gone(world: World, adopted: int) -> None:
    assert adopted
    world.lending.link_lost(peer_is_gone=False, now_s=0, grace_s=10)
    world.lending.peer_gone()
    assert world.states() == {BlockState.FREE}


def test_a_dead_peer_reads_nothing(world: World, adopted: int) -> None:
    assert adopted
    world.lending.link_lost(peer_is_gone=True, now_s=0, grace_s=10)
    assert world.states() == {BlockState.FREE}
    assert world.allocator.num_checked == 1


def test_a_new_link_frees_what_decoded_does_not_hold(world: World, adopted: int) -> None:
    assert adopted
    world.lending.link_lost(peer_is_gone=False, now_s=0, grace_s=10)
    world.lending.link_restored(frozenset())
    assert world.states() == {BlockState.FREE}


def test_a_new_link_keeps_what_decoded_still_holds(world: World, adopted: int) -> None:
    world.lending.link_lost(peer_is_gone=False, now_s=0, grace_s=10)
    world.lending.link_restored(frozenset({adopted}))
    assert world.states() == {BlockState.QUARANTINED}
    world.lending.on_release(adopted)
    assert world.states() == {BlockState.FREE}


def test_a_block_that_two_leases_share_is_kept_until_both_are_over(world: World) -> None:
    """Each lease's generation ends with it; the other one's reader goes on."""
    allocator = BlockAllocator(12)
    holds = BlockHolds(allocator, block_size=BLOCK_SIZE)
    lending = Lending(
        leases=LeaseTable(NUM_SLOTS),
        holds=holds,
        control_page=world.page,
        log=get_logger(),
        metrics=PrefillMetrics(Metrics()),
        listener=world.listener,
    )
    leases = []
    for _ in range(2):
        request = new_request(NOBODY, num_tokens=BLOCK_SIZE + 1)
        request.hold = holds.take(request.num_tokens, [b"same"])
        assert request.hold is not None
        holds.computed(request.hold, request.num_tokens)
        leases.append(lending.lend(request))
        lending.handoff_sent(leases[-1])
        lending.on_adopt(leases[-1].lease_id)
    first, second = leases
    shared = first.blocks[0]
    assert second.blocks[0] == shared
    lending.on_release(first.lease_id)
    assert world.page.read(first.slot) > first.generation
    assert world.page.read(second.slot) == second.generation
    assert allocator.state(shared) is BlockState.LEASED
    lending.link_lost(peer_is_gone=False, now_s=0.0, grace_s=1.0)
    assert world.page.read(second.slot) > second.generation
    assert allocator.state(shared) is BlockState.QUARANTINED
    lending.expire(1.0)
    assert allocator.state(shared) is BlockState.CACHED
    holds.check_integrity()
