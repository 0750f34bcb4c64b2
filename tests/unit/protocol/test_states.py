"""The tables themselves: complete, mirrored, and explained."""

from __future__ import annotations

import pytest

from protocol import messages as m
from protocol.states import (
    EXPLANATIONS,
    INCOMING,
    INITIAL,
    MAX_RECEIVED_BYTES,
    MAX_SENT_BYTES,
    RECEIVES,
    SENDS,
    Role,
    State,
)

PEERS = [
    (Role.CLIENT, Role.PREFILLD_CLIENT),
    (Role.PREFILLD_LINK, Role.DECODED_LINK),
]


def sent_by(role: Role) -> set[type[m.Message]]:
    return {kind for row in SENDS[role].values() for kind in row}


def received_by(role: Role) -> set[type[m.Message]]:
    return {kind for row in RECEIVES[role].values() for kind in row}


def test_every_state_is_explained() -> None:
    """The README prints these sentences."""
    assert set(EXPLANATIONS) == set(State)


@pytest.mark.parametrize("table", [INITIAL, SENDS, RECEIVES, INCOMING, MAX_RECEIVED_BYTES])
def test_every_role_has_its_tables(table: dict[Role, object]) -> None:
    """A role without a row would fail at its first message."""
    assert set(table) == set(Role)
    assert set(MAX_SENT_BYTES) == set(Role)


@pytest.mark.parametrize("role", Role)
def test_tables_and_schemas_name_the_same_messages(role: Role) -> None:
    """What may arrive at a role in some state is exactly what its schema lets through."""
    expected = set(INCOMING[role].__args__)
    if role is Role.DECODED_CLIENT:
        expected -= {m.Cancel}  # nothing runs there that could be cancelled
    if role is Role.DECODED_MIGRATED:
        expected = {m.Cancel}
    assert received_by(role) == expected


@pytest.mark.parametrize(("one", "other"), PEERS)
def test_what_one_end_sends_the_other_receives(one: Role, other: Role) -> None:
    """A message that only one end's table knows is a misprint."""
    assert sent_by(one) == received_by(other)
    # Before HELLO, decoded speaks to prefilld as to a client.
    as_client = {m.Error} if other is Role.DECODED_LINK else set()
    assert sent_by(other) | as_client == received_by(one)


@pytest.mark.parametrize("role", Role)
def test_every_state_of_a_role_can_be_reached(role: Role) -> None:
    """A row that nothing leads to is dead, and hides that something else is missing."""
    reached = {INITIAL[role], State.FAILED}
    rows = [SENDS[role], RECEIVES[role]]
    while True:
        following = {
            target
            for table in rows
            for state in reached
            for target in table.get(state, {}).values()
        }
        if following <= reached:
            break
        reached |= following
    assert set(SENDS[role]) | set(RECEIVES[role]) <= reached


@pytest.mark.parametrize("role", Role)
def test_closed_and_done_are_final(role: Role) -> None:
    """Nothing is sent any more, and nothing changes the state."""
    for state in (State.CLOSED, State.DONE):
        assert state not in SENDS[role]
        assert state not in RECEIVES[role]
