"""The heartbeat: what feeds the watchdog, what does not, and what is said before the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from shared.clock import FakeClock
from shared.logs import get_logger
from shared.service.heartbeat import START_EXTENSION_S, STUCK_S, Heartbeat
from shared.service.notify import Notifier


class Manager(Notifier):
    """A service manager that keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.told: list[str] = []

    def _send(self, *assignments: str) -> bool:
        self.told.extend(assignments)
        return True


class Engine:
    """An engine that ends a probe at the next beat, unless it is stuck."""

    def __init__(self) -> None:
        self.num_finished = 0
        self.is_stuck = False

    def probe(self) -> None:
        self.num_finished += not self.is_stuck

    def stack(self) -> str:
        return "in a launch"


@dataclass
class World:
    """A daemon's heartbeat and everything around it."""

    watchdog_s: float | None = 8.0
    is_starting: bool = False
    text: str = "serving"
    clock: FakeClock = field(default_factory=FakeClock)
    manager: Manager = field(default_factory=Manager)
    engine: Engine = field(default_factory=Engine)

    def __post_init__(self) -> None:
        self.heart = Heartbeat(
            notifier=self.manager,
            watchdog_s=self.watchdog_s,
            clock=self.clock,
            log=get_logger(),
            describe=lambda: self.text,
            is_start_extended=lambda: self.is_starting,
        )

    def beat(self) -> list[str]:
        """Beat a second later, and return what the manager was told."""
        self.clock.advance(1)
        self.manager.told.clear()
        self.heart.beat()
        return list(self.manager.told)


def test_the_watchdog_is_fed_while_the_engine_moves() -> None:
    world = World()
    world.heart.watch(world.engine)
    world.beat()
    assert [world.beat() for _ in range(3)] == [["WATCHDOG=1"]] * 3


def test_a_stuck_engine_feeds_no_watchdog_though_the_loop_beats() -> None:
    """The loop answers STATUS and pings for ever; systemd is the only one to end that."""
    world = World()
    world.heart.watch(world.engine)
    world.beat()
    world.engine.is_stuck = True
    world.beat()  # the probe of the beat before
    with capture_logs() as logs:
        assert [world.beat() for _ in range(6)] == [[]] * 6
    assert logs == [
        {"event": "engine.stuck", "log_level": "error", "silent_s": 4.0, "stack": "in a launch"}
    ]
    world.engine.is_stuck = False
    world.beat()
    assert world.beat() == ["WATCHDOG=1"]


def test_without_a_watchdog_a_stuck_engine_is_told_all_the_same() -> None:
    world = World(watchdog_s=None)
    world.heart.watch(world.engine)
    world.engine.is_stuck = True
    with capture_logs() as logs:
        for _ in range(round(STUCK_S) + 1):
            world.beat()
    assert [line["event"] for line in logs] == ["engine.stuck"]
    assert world.manager.told == []


def test_before_there_is_an_engine_the_loop_is_all_that_has_to_move() -> None:
    """Importing takes seconds, and nothing can be stuck yet."""
    world = World()
    world.beat()
    assert world.beat() == ["WATCHDOG=1"]


def test_a_load_that_moves_buys_time_and_one_that_stands_still_does_not() -> None:
    """A model of 140 GB takes minutes; a disk that hangs is to fail the start."""
    world = World(is_starting=True)
    world.engine.is_stuck = True  # one call loads the model
    world.heart.watch(world.engine)
    world.heart.loaded(1, 4)
    extension = f"EXTEND_TIMEOUT_USEC={round(START_EXTENSION_S * 1e6)}"
    assert extension in world.beat()
    assert world.heart.percent_loaded == 25
    assert world.beat() == []
    world.heart.loaded(4, 4)
    assert extension in world.beat()
    world.is_starting = False
    world.engine.is_stuck = False
    world.beat()
    assert world.beat() == ["WATCHDOG=1"]


def test_a_long_load_is_logged_every_three_seconds_and_a_short_one_never() -> None:
    """Whoever watches a terminal sees that it moves; a log of ordinary starts stays short."""
    with capture_logs() as logs:
        world = World()
        for percent in range(0, 101, 10):
            world.heart.loaded(percent, 100)
            world.beat()
    told = [line["percent"] for line in logs if line["event"] == "model.loading"]
    assert told == [20, 50, 80]
    with capture_logs() as logs:
        quick = World()
        quick.heart.loaded(100, 100)
        for _ in range(10):
            quick.beat()
    assert [line for line in logs if line["event"] == "model.loading"] == []


def test_status_is_told_when_it_changes() -> None:
    world = World(watchdog_s=None)
    assert world.beat() == ["STATUS=serving"]
    assert world.beat() == []
    world.text = "draining"
    assert world.beat() == ["STATUS=draining"]


@pytest.mark.parametrize(("watchdog_s", "interval_s"), [(None, 1), (60, 1), (2, 0.5)])
def test_a_short_watchdog_is_fed_several_times_a_period(
    watchdog_s: float | None, interval_s: float
) -> None:
    assert World(watchdog_s=watchdog_s).heart._interval_s == interval_s
