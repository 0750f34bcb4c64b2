"""How far the loading of a model is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.clock import FakeClock
from shared.daemon.load_progress import REPORT_INTERVAL_S, LoadProgress, load_progress
from tests.unit.shared.daemon.kit import RecordingService, run, turns

if TYPE_CHECKING:
    from pathlib import Path


def test_a_model_that_loads_quickly_is_not_reported() -> None:
    heard: list[int] = []
    progress = LoadProgress(heard.append, FakeClock())
    for done in range(10):
        progress(done, 10)
    assert heard == []


def test_a_slow_one_is_reported_every_two_seconds() -> None:
    """Whatever the number of runs in between."""
    heard: list[int] = []
    clock = FakeClock()
    progress = LoadProgress(heard.append, clock)
    for done in range(1001):
        progress(done, 1000)
        clock.advance(REPORT_INTERVAL_S / 250)
    assert heard == [25, 50, 75, 100]


def test_reports_reach_the_service_on_its_loop(tmp_path: Path) -> None:
    """The loader calls from the engine's thread."""
    heard: list[int] = []

    class Service(RecordingService):
        def loading(self, percent: int) -> None:
            heard.append(percent)

    async def scene() -> None:
        service = Service("prefilld", tmp_path, {})
        progress = load_progress(service)
        service.clock.advance(REPORT_INTERVAL_S)
        progress(1, 3)
        assert heard == [], "not from the thread that loads"
        await turns()
        assert heard == [33]

    run(scene())
