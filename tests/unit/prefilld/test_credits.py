"""Room at decoded, counting what is on its way."""

from __future__ import annotations

import pytest

from prefilld.credits import REJECT_PAUSE_NS, CreditAccount


def test_nothing_may_be_reserved_before_decoded_said_anything() -> None:
    assert not CreditAccount().covers(0)


def test_what_is_on_its_way_is_subtracted_until_it_was_seen() -> None:
    account = CreditAccount()
    account.update(free_blocks=10, free_sequences=2, seen=0)
    account.spend(6)
    assert not account.covers(5)
    assert account.covers(4)
    account.update(free_blocks=4, free_sequences=1, seen=1)
    assert account.covers(4)


def test_a_frame_that_crossed_ours_promises_nothing_twice() -> None:
    """Decoded counted before it read our CHUNK: its 10 blocks still contain our 6."""
    account = CreditAccount()
    account.update(free_blocks=10, free_sequences=2, seen=0)
    account.spend(6)
    account.update(free_blocks=10, free_sequences=2, seen=0)
    assert account.free_blocks == 4
    assert account.free_sequences == 1


def test_a_handoff_after_a_chunk_takes_nothing_more() -> None:
    account = CreditAccount()
    account.update(free_blocks=10, free_sequences=2, seen=0)
    account.spend(6)
    account.spend_reserved()
    account.update(free_blocks=4, free_sequences=1, seen=1)
    assert (account.free_blocks, account.free_sequences) == (4, 1)


def test_having_seen_more_than_was_sent_is_refused() -> None:
    account = CreditAccount()
    with pytest.raises(ValueError, match="saw 1 reservations, but only 0 were sent"):
        account.update(free_blocks=1, free_sequences=1, seen=1)


def test_a_reject_is_a_reason_to_wait_for_a_moment() -> None:
    """Decoded told of room and did not take it; asked again at once it would say the same."""
    account = CreditAccount()
    assert not account.are_doubted(now_ns=5)
    account.rejected(now_ns=5)
    assert account.are_doubted(now_ns=5 + REJECT_PAUSE_NS - 1)
    assert not account.are_doubted(now_ns=5 + REJECT_PAUSE_NS)


def test_what_can_never_fit_is_not_waited_for() -> None:
    """Those behind it would wait for nothing; decoded's REJECT says so to its client."""
    account = CreditAccount(most_blocks=10)
    account.update(free_blocks=3, free_sequences=1, seen=0)
    assert not account.covers(10)
    assert account.covers(11)
    account.spend(11)
    assert not account.covers(11)
