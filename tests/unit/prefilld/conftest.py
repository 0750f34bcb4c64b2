"""Whose service the tests of this folder have, and a stage for what happens in its inner rooms."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from shared.service.frame import DaemonName
from tests.unit.prefilld.world import World
from tests.unit.shared.daemon.kit import RecordingService, run

Scene = Callable[[World], Coroutine[Any, Any, None]]


@pytest.fixture
def daemon_name() -> DaemonName:
    """Whose service the tests of this folder have."""
    return "prefilld"


@pytest.fixture
def play(
    make_service: Callable[..., RecordingService], host: ModelHost
) -> Iterator[Callable[..., None]]:
    """Run a scene in a world; afterwards the books must add up."""

    def play_scene(scene: Scene, **settings: object) -> None:
        service = make_service(**settings)

        async def whole() -> None:
            world = World(service, host, EngineThread(num_threads=1))
            try:
                await scene(world)
                world.holds.check_integrity()
            finally:
                await world.close()

        run(whole())

    with capture_logs():
        yield play_scene
