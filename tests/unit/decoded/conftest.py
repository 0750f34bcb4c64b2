"""A scene in decoded's inner rooms."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.daemon.model_host import ModelHost
from shared.service.frame import DaemonName
from tests.unit.decoded.world import MakeTurns, World, eager_turns
from tests.unit.shared.daemon.kit import RecordingService, run


@pytest.fixture
def daemon_name() -> DaemonName:
    """Whose service the tests of this folder have."""
    return "decoded"


@pytest.fixture
def make_turns() -> MakeTurns:
    """How the engine takes turns, unless a test asks for others."""
    return eager_turns


@pytest.fixture
def play(
    make_service: Callable[..., RecordingService], host: ModelHost, make_turns: MakeTurns
) -> Callable[..., list[Any]]:
    """Run a scene in decoded's inner rooms; keyword arguments are settings."""

    def play_scene(
        scene: Callable[[World], Coroutine[Any, Any, None]], **settings: object
    ) -> list[Any]:
        service = make_service(**settings)

        async def whole() -> None:
            world = World(service, host, make_turns)
            try:
                await scene(world)
            finally:
                await world.close()

        with capture_logs() as logs:
            run(whole())
        return logs

    return play_scene
