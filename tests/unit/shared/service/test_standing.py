"""When a daemon counts as started, and what its manager hears of it."""

from __future__ import annotations

import pytest

from shared.clock import FakeClock
from shared.logs import get_logger
from shared.service.standing import Standing
from shared.states import DaemonName, DaemonState
from tests.unit.shared.service.test_heartbeat import Engine, Manager


def standing(name: DaemonName) -> tuple[Standing, Manager]:
    manager = Manager()
    return (
        Standing(
            name=name,
            model="tiny",
            notifier=manager,
            watchdog_s=None,
            clock=FakeClock(),
            log=get_logger(),
        ),
        manager,
    )


@pytest.mark.parametrize(
    ("name", "ready_in"),
    [("prefilld", DaemonState.SERVING), ("decoded", DaemonState.WAITING)],
)
def test_each_daemon_is_ready_once_in_its_own_state(
    name: DaemonName, ready_in: DaemonState
) -> None:
    """With its model for decoded; with the link for prefilld, which needs decoded."""
    stands, manager = standing(name)
    heard: list[DaemonState] = []
    for state in (DaemonState.WAITING, DaemonState.SERVING, DaemonState.WAITING):
        manager.told.clear()
        stands.enter(state, stop_within_s=30)
        if "READY=1" in manager.told:
            heard.append(state)
    assert heard == [ready_in]


def test_prefilld_gets_time_for_as_long_as_decoded_is_there_and_loads() -> None:
    """A decoded that is not there at all fails the start, and systemd tells so."""
    stands, _ = standing("prefilld")
    is_there = True
    stands.attend(Engine(), num_requests=lambda: 3, is_peer_starting=lambda: is_there)
    assert stands._is_start_extended()
    stands.enter(DaemonState.WAITING, stop_within_s=30)
    assert stands._is_start_extended()
    is_there = False
    assert not stands._is_start_extended()
    is_there = True
    stands.enter(DaemonState.SERVING, stop_within_s=30)
    assert not stands._is_start_extended()
    assert stands.describe() == "serving 3 requests"


def test_a_reload_during_the_start_does_not_declare_the_daemon_ready() -> None:
    stands, manager = standing("prefilld")
    with stands.reloading():
        pass
    assert manager.told == []
    stands.enter(DaemonState.SERVING, stop_within_s=30)
    manager.told.clear()
    with stands.reloading():
        assert manager.told == ["RELOADING=1", "MONOTONIC_USEC=1000000"]
    assert manager.told[2:] == ["READY=1"]


def test_a_stop_asks_for_the_time_to_drain_and_something_more() -> None:
    """The unit's own time-out knows nothing of a longer `drain_timeout_s`."""
    stands, manager = standing("decoded")
    stands.enter(DaemonState.DRAINING, stop_within_s=600)
    assert manager.told[:2] == ["STOPPING=1", "EXTEND_TIMEOUT_USEC=615000000"]
