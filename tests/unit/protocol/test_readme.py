"""The protocol's page says what the code does."""

from __future__ import annotations

import pytest

from protocol import messages as m
from protocol.errors import CODES
from protocol.readme import README, render
from protocol.states import State


def test_the_page_is_up_to_date() -> None:
    """Run `python -m protocol.readme` when this fails."""
    text = README.read_text(encoding="utf-8")
    assert render(text) == text


def test_the_page_names_every_message_state_and_code() -> None:
    """What is missing there does not exist for a client's author."""
    text = README.read_text(encoding="utf-8")
    for name in [*m.MESSAGE_TYPES, *CODES]:
        assert f"`{name}`" in text
    for state in set(State) - {State.HANDED_OFF, State.DONE}:
        assert state.value in text


def test_a_stale_part_is_made_anew_and_the_rest_left_alone() -> None:
    """Hand-written text survives the generator."""
    stale = "Mine.\n<!-- generated: codes -->\nold\n<!-- end -->\nMine too.\n"
    fresh = render(stale)
    assert fresh.startswith("Mine.\n<!-- generated: codes -->\n")
    assert fresh.endswith("<!-- end -->\nMine too.\n")
    assert "old" not in fresh
    assert "`busy`" in fresh


def test_an_unknown_part_is_an_error() -> None:
    """A misprinted marker must not empty a section in silence."""
    with pytest.raises(KeyError, match="cods"):
        render("<!-- generated: cods -->\n<!-- end -->")
