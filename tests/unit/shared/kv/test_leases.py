"""Tests of shared/kv/leases.py."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from shared.kv.errors import IntegrityError, LeaseStateError, NoSlotError
from shared.kv.lease_states import (
    OUR_EVENTS,
    TRANSITIONS,
    CloseClient,
    Effect,
    FreeBlocks,
    Ignored,
    LeaseEvent,
    LeaseState,
    PublishGeneration,
    Quarantine,
    ReturnReason,
    ReturnRequest,
    SendAbort,
)
from shared.kv.leases import LeaseTable

GRACE_S = 10.0

Step = Callable[[LeaseTable], object]
PATHS: dict[LeaseState, list[Step]] = {
    LeaseState.OPEN: [],
    LeaseState.CHUNKED: [lambda table: table.chunk_sent(1)],
    LeaseState.DECLINED: [lambda table: table.chunk_sent(1), lambda table: table.nochunk(1)],
    LeaseState.SENT: [lambda table: table.handoff_sent(1)],
    LeaseState.ADOPTED: [lambda table: table.handoff_sent(1), lambda table: table.adopt(1)],
    LeaseState.RECALLED: [lambda table: table.handoff_sent(1), lambda table: table.abort(1)],
    LeaseState.ABORTING: [lambda table: table.chunk_sent(1), lambda table: table.abort(1)],
    LeaseState.QUARANTINED: [
        lambda table: table.handoff_sent(1),
        lambda table: table.adopt(1),
        lambda table: table.link_lost(peer_is_gone=False, now_s=0.0, grace_s=GRACE_S),
    ],
}
"""How lease 1 gets into each state."""

REVOKE = PublishGeneration(0, 2)
FREE = FreeBlocks(1, (3, 4))


def table_in(state: LeaseState, num_slots: int = 4) -> LeaseTable:
    """Return a table whose lease 1, of request `r` on blocks 3 and 4 in slot 0, is in `state`."""
    table = LeaseTable(num_slots)
    table.open("r", [3, 4])
    for step in PATHS[state]:
        step(table)
    lease = table.get(1)
    assert lease is not None
    assert lease.state is state
    return table


def state_of(table: LeaseTable, lease_id: int = 1) -> LeaseState:
    """Return the state of a lease; ENDED where the table has forgotten it."""
    lease = table.get(lease_id)
    return LeaseState.ENDED if lease is None else lease.state


# --- the table of transitions ------------------------------------------------------------------


@pytest.mark.parametrize(("state", "event"), [*product(TRANSITIONS, LeaseEvent)])
def test_what_the_table_does_not_list_changes_nothing(state: LeaseState, event: LeaseEvent) -> None:
    """Late, doubled and reordered messages are counted; our own missteps are errors."""
    table = table_in(state)
    before = (table.get(1), table.counts())
    if event in TRANSITIONS[state]:
        table._happen(1, event, deadline_s=1.0)
        assert state_of(table) is TRANSITIONS[state][event].to
    elif event in OUR_EVENTS:
        with pytest.raises(LeaseStateError, match=f"lease 1 is {state.value}; {event.value}"):
            table._happen(1, event)
        assert (table.get(1), table.counts()) == before
    else:
        assert table._happen(1, event) == [Ignored(event, 1)]
        assert (table.get(1), table.counts()) == before
    table.check_integrity()


# --- opening --------------------------------------------------------------------------------


def test_leases_count_up_from_one_and_publish_their_generation_first() -> None:
    """The generation stands on the page before the peer can hear of the lease."""
    table = LeaseTable(4)
    first, effects = table.open("a", [3])
    assert (first.lease_id, first.slot, first.generation) == (1, 0, 1)
    assert effects == [PublishGeneration(0, 1)]
    second, effects = table.open("b", [5, 4])
    assert (second.lease_id, second.slot, second.generation) == (2, 1, 1)
    assert effects == [PublishGeneration(1, 1)]
    assert (second.request_id, second.blocks) == ("b", (5, 4))
    assert [lease.lease_id for lease in table] == [1, 2]
    assert repr(table) == "<LeaseTable 2 slots free; 1 open, 2 open>"


def test_without_a_free_slot_nothing_is_opened() -> None:
    """The lease would have no fence."""
    table = LeaseTable(1)
    table.open("a", [1])
    with pytest.raises(NoSlotError, match="all 1 lease slots are taken"):
        table.open("b", [2])
    assert len(table) == 1
    table.abort(1)
    assert table.open("b", [2])[0].lease_id == 2


def test_a_table_needs_a_slot() -> None:
    """Without one every request would wait for ever."""
    with pytest.raises(ValueError, match="num_slots is 0"):
        LeaseTable(0)


def test_a_slot_never_holds_a_generation_twice() -> None:
    """A reader that slept through a whole lease must not take the next one for its own."""
    table = LeaseTable(1)
    published: list[Effect] = []
    for _ in range(3):
        lease, effects = table.open("r", [1])
        published += effects
        published += table.abort(lease.lease_id)[:1]
    assert published == [PublishGeneration(0, generation) for generation in range(1, 7)]


def test_quarantine_keeps_the_slot() -> None:
    """The peer in doubt still compares that slot with its generation."""
    table = table_in(LeaseState.QUARANTINED, num_slots=1)
    with pytest.raises(NoSlotError, match="all 1 lease slots"):
        table.open("b", [2])
    table.expire(GRACE_S)
    lease, effects = table.open("b", [2])
    assert lease.generation == 3
    assert effects == [PublishGeneration(0, 3)]


# --- what goes well -------------------------------------------------------------------------


def test_a_handed_over_request_runs_from_open_to_release() -> None:
    """The client's duplicate closes at ADOPT, the blocks are revoked and freed at RELEASE."""
    table = LeaseTable(4)
    table.open("r", [3, 4])
    table.chunk_sent(1)
    table.chunk_sent(1)
    table.handoff_sent(1)
    assert table.adopt(1) == [CloseClient(1)]
    assert table.release(1) == [REVOKE, FREE]
    assert table.get(1) is None
    assert table.release(1) == [Ignored(LeaseEvent.RELEASE, 1)]


def test_a_declined_reservation_is_handed_over_all_the_same() -> None:
    """NOCHUNK only says that nothing is pulled before the hand-off."""
    table = table_in(LeaseState.DECLINED)
    with pytest.raises(LeaseStateError, match="lease 1 is declined; chunk-sent"):
        table.chunk_sent(1)
    table.handoff_sent(1)
    assert table.adopt(1) == [CloseClient(1)]


def test_a_nochunk_that_crosses_the_handoff_is_no_fault() -> None:
    """The peer answered a CHUNK before it read the HANDOFF behind it."""
    table = table_in(LeaseState.SENT)
    assert table.nochunk(1) == []
    assert state_of(table) is LeaseState.SENT


def test_a_rejected_request_comes_back_and_goes_out_under_a_new_lease() -> None:
    """REJECT implies RELEASE: the old lease is revoked, the blocks stay the request's."""
    table = table_in(LeaseState.SENT)
    assert table.reject(1) == [REVOKE, ReturnRequest(1, "r", ReturnReason.REJECTED)]
    lease, effects = table.open("r", [3, 4])
    assert (lease.lease_id, lease.generation) == (2, 3)
    assert effects == [PublishGeneration(0, 3)]


@pytest.mark.parametrize("state", [LeaseState.OPEN, LeaseState.CHUNKED, LeaseState.DECLINED])
def test_an_answer_to_a_handoff_that_was_not_sent_is_ignored(state: LeaseState) -> None:
    """A peer that invents one must not free the blocks of a running prefill."""
    table = table_in(state)
    assert table.adopt(1) == [Ignored(LeaseEvent.ADOPT, 1)]
    assert table.reject(1) == [Ignored(LeaseEvent.REJECT, 1)]
    assert table.release(1) == [Ignored(LeaseEvent.RELEASE, 1)]
    assert state_of(table) is state


def test_a_release_that_overtakes_its_adopt_is_ignored() -> None:
    """Who owns the client is not known yet; the end of the link will tell."""
    table = table_in(LeaseState.SENT)
    assert table.release(1) == [Ignored(LeaseEvent.RELEASE, 1)]
    assert table.adopt(1) == [CloseClient(1)]


# --- aborting -------------------------------------------------------------------------------


def test_aborting_what_the_peer_never_heard_of_needs_no_answer() -> None:
    """Nobody would ever send the RELEASE."""
    assert table_in(LeaseState.OPEN).abort(1) == [REVOKE, FREE]


@pytest.mark.parametrize(
    "state", [LeaseState.CHUNKED, LeaseState.DECLINED, LeaseState.SENT, LeaseState.ADOPTED]
)
def test_an_abort_frees_nothing_before_the_release(state: LeaseState) -> None:
    """A copy may be in flight; RELEASE comes after it."""
    table = table_in(state)
    assert table.abort(1) == [SendAbort(1)]
    assert table.abort(1) == [Ignored(LeaseEvent.ABORT, 1)]
    assert table.release(1) == [REVOKE, FREE]
    assert table.release(1) == [Ignored(LeaseEvent.RELEASE, 1)]


def test_an_adopt_that_crosses_the_abort_still_closes_the_client_once() -> None:
    """While a duplicate lives, the client sees no end of the stream."""
    table = table_in(LeaseState.RECALLED)
    assert table.adopt(1) == [CloseClient(1)]
    assert table.adopt(1) == [Ignored(LeaseEvent.ADOPT, 1)]
    assert table.release(1) == [REVOKE, FREE]


def test_a_reject_that_crosses_the_abort_ends_the_lease() -> None:
    """It implies RELEASE, so the one that answers ABORT is the late one."""
    table = table_in(LeaseState.RECALLED)
    assert table.reject(1) == [REVOKE, FREE]
    assert table.release(1) == [Ignored(LeaseEvent.RELEASE, 1)]


# --- a link that is lost --------------------------------------------------------------------


@pytest.mark.parametrize("peer_is_gone", [True, False])
@pytest.mark.parametrize(
    "state", [LeaseState.OPEN, LeaseState.CHUNKED, LeaseState.DECLINED, LeaseState.SENT]
)
def test_a_request_not_adopted_comes_back_with_its_blocks(
    state: LeaseState, *, peer_is_gone: bool
) -> None:
    """Its client is still this daemon's, so the next decoded gets it."""
    table = table_in(state)
    effects = table.link_lost(peer_is_gone=peer_is_gone, now_s=0.0, grace_s=GRACE_S)
    assert effects == [REVOKE, ReturnRequest(1, "r", ReturnReason.LINK_LOST)]
    assert len(table) == 0


LENT_AWAY = [LeaseState.ADOPTED, LeaseState.RECALLED, LeaseState.ABORTING]


@pytest.mark.parametrize("state", LENT_AWAY)
def test_a_peer_that_is_gone_reads_nothing(state: LeaseState) -> None:
    """Its blocks are back at once."""
    effects = table_in(state).link_lost(peer_is_gone=True, now_s=0.0, grace_s=GRACE_S)
    assert effects == [REVOKE, FREE]


@pytest.mark.parametrize("state", LENT_AWAY)
def test_a_peer_in_doubt_is_fenced_off_and_its_blocks_are_kept_apart(state: LeaseState) -> None:
    """The generation voids what it reads, the quarantine spares it from reading garbage."""
    table = table_in(state)
    effects = table.link_lost(peer_is_gone=False, now_s=5.0, grace_s=GRACE_S)
    assert effects == [REVOKE, Quarantine(1, (3, 4))]
    assert table.expire(14.9) == []
    assert table.expire(15.0) == [FREE]
    assert table.expire(15.0) == []


def test_the_news_of_the_peers_death_ends_quarantine_and_nothing_else() -> None:
    """A lease under a link that still stands waits for the end of that link."""
    table = table_in(LeaseState.QUARANTINED)
    table.open("b", [5])
    table.handoff_sent(2)
    assert table.peer_gone() == [FREE]
    assert state_of(table, 2) is LeaseState.SENT


def test_a_new_link_ends_what_the_peer_does_not_hold() -> None:
    """WELCOME lists what it still reads; the rest has come to rest."""
    table = LeaseTable(4)
    for request_id, block in (("a", 1), ("b", 2)):
        lease, _ = table.open(request_id, [block])
        table.handoff_sent(lease.lease_id)
        table.adopt(lease.lease_id)
    table.link_lost(peer_is_gone=False, now_s=0.0, grace_s=GRACE_S)
    assert table.link_restored({2}) == [FreeBlocks(1, (1,))]
    assert state_of(table, 2) is LeaseState.QUARANTINED
    assert table.release(2) == [FreeBlocks(2, (2,))]


def test_what_the_peer_holds_in_vain_is_counted() -> None:
    """It was revoked long ago, and the peer will see so on the control page."""
    table = table_in(LeaseState.OPEN)
    assert table.link_restored({1, 7}) == [
        Ignored(LeaseEvent.HELD, 1),
        Ignored(LeaseEvent.HELD, 7),
    ]


def test_losing_the_link_again_prolongs_no_quarantine() -> None:
    """A link that flaps must not keep blocks away for ever."""
    table = table_in(LeaseState.QUARANTINED)
    table.link_restored({1})
    assert table.link_lost(peer_is_gone=False, now_s=9.0, grace_s=GRACE_S) == []
    assert table.expire(GRACE_S) == [FREE]


def test_a_new_link_before_the_old_one_was_lost_is_a_bug_of_ours() -> None:
    """The leases of the old link would be nobody's."""
    table = table_in(LeaseState.SENT)
    with pytest.raises(LeaseStateError, match="lease 1 is sent; a new link cannot happen"):
        table.link_restored(set())


def test_effects_come_lease_by_lease_in_the_order_of_their_ids() -> None:
    """Each revocation stands right before what it makes safe."""
    table = LeaseTable(4)
    for request_id, block in (("a", 1), ("b", 2)):
        table.open(request_id, [block])
    table.handoff_sent(1)
    table.adopt(1)
    assert table.link_lost(peer_is_gone=True, now_s=0.0, grace_s=GRACE_S) == [
        PublishGeneration(0, 2),
        FreeBlocks(1, (1,)),
        PublishGeneration(1, 2),
        ReturnRequest(2, "b", ReturnReason.LINK_LOST),
    ]


# --- the books ------------------------------------------------------------------------------


def test_counts_name_every_state() -> None:
    """Each is a gauge."""
    counts = table_in(LeaseState.ADOPTED).counts()
    assert counts.pop(LeaseState.ADOPTED) == 1
    assert set(counts.values()) == {0}


def test_a_lost_slot_is_found() -> None:
    """Slots that leak would end in a daemon that can lend nothing."""
    table = table_in(LeaseState.OPEN)
    table._free_slots.pop()
    with pytest.raises(IntegrityError, match=r"slots \[0\] are taken and \[3, 2\] are free"):
        table.check_integrity()


def test_a_generation_that_moved_under_a_lease_is_found() -> None:
    """The peer would throw away good work."""
    table = table_in(LeaseState.OPEN)
    table._generations[0] += 1
    with pytest.raises(IntegrityError, match="slot 0 is at generation 2, and lease 1"):
        table.check_integrity()
