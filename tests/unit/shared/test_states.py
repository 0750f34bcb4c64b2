"""A daemon's state in words."""

from __future__ import annotations

import pytest

from shared.states import DaemonName, DaemonState, describe


@pytest.mark.parametrize(
    ("name", "state", "text"),
    [
        ("prefilld", DaemonState.LOADING, "loading tiny, 42 %"),
        ("prefilld", DaemonState.WAITING, "waiting for decoded"),
        ("decoded", DaemonState.WAITING, "waiting for prefilld"),
        ("decoded", DaemonState.SERVING, "serving 12 requests"),
        ("decoded", DaemonState.DRAINING, "draining, 12 requests left"),
    ],
)
def test_a_state_is_one_line_that_says_what_is_being_done(
    name: DaemonName, state: DaemonState, text: str
) -> None:
    assert describe(name, state, model="tiny", percent=42, num_requests=12) == text


@pytest.mark.parametrize(("number", "text"), [(0, "no requests"), (1, "1 request")])
def test_few_requests_are_told_as_people_say_them(number: int, text: str) -> None:
    told = describe("decoded", DaemonState.SERVING, model="m", percent=0, num_requests=number)
    assert told == f"serving {text}"
