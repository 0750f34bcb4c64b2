"""Tests of the table in shared/kv/lease_states.py; test_leases.py holds the code to it."""

from __future__ import annotations

from shared.kv.lease_states import TRANSITIONS, LeaseEvent, LeaseState, Outcome


def test_every_state_but_the_last_has_its_row() -> None:
    """A lease can be in no state that the table does not know."""
    assert TRANSITIONS.keys() == set(LeaseState) - {LeaseState.ENDED}


def test_no_lease_outlives_both_the_link_and_the_peer() -> None:
    """Whatever state a lease is in, a peer that is gone ends it."""
    for state, row in TRANSITIONS.items():
        assert LeaseEvent.LINK_LOST in row, state
        assert row[LeaseEvent.PEER_GONE].to is LeaseState.ENDED, state


def test_a_lease_ends_only_by_freeing_or_returning() -> None:
    """Any other end would leak its blocks."""
    for row in TRANSITIONS.values():
        for edge in row.values():
            ends = edge.to is LeaseState.ENDED
            assert ends is (edge.outcome in {Outcome.FREE, Outcome.RETURN})


def test_the_peer_cannot_take_back_an_adoption() -> None:
    """Once the client's connection is the peer's, only the peer can answer the client."""
    reached = {edge.to for edge in TRANSITIONS[LeaseState.ADOPTED].values()}
    assert reached == {LeaseState.ENDED, LeaseState.ABORTING, LeaseState.QUARANTINED}
    assert all(
        edge.outcome is not Outcome.RETURN
        for state in reached - {LeaseState.ENDED}
        for edge in TRANSITIONS[state].values()
    )
