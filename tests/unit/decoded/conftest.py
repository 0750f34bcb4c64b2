"""A service, and a model that was loaded once."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.daemon.model_host import ModelHost
from tests.support.tiny_gguf import TinyGguf
from tests.unit.decoded.world import World
from tests.unit.shared.daemon.kit import RecordingService, load_host, run

MakeService = Callable[..., RecordingService]


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[MakeService]:
    """Make a service with these settings (`link__ping_interval_s=1`); none may fail."""
    made: list[RecordingService] = []

    def make(**settings: object) -> RecordingService:
        by_key = {name.replace("__", "."): value for name, value in settings.items()}
        made.append(RecordingService("decoded", tmp_path, by_key))
        return made[-1]

    yield make
    for service in made:
        service.close()
    assert [error for service in made for error in service.failures] == []


@pytest.fixture
def service(make_service: MakeService) -> RecordingService:
    """A service with the default settings and a clock that stands still."""
    return make_service()


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with random weights and a context of 128 tokens."""
    return TinyGguf().write(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def host(model_file: Path) -> Iterator[ModelHost]:
    """That model in memory, over a pool of 16 blocks of 16 tokens."""
    host = load_host(model_file)
    yield host
    if host.template is not None:
        host.template.close()


@pytest.fixture
def play(make_service: MakeService, host: ModelHost) -> Callable[..., list[Any]]:
    """Run a scene in decoded's inner rooms; keyword arguments are settings."""

    def play_scene(
        scene: Callable[[World], Coroutine[Any, Any, None]], **settings: object
    ) -> list[Any]:
        service = make_service(**settings)

        async def whole() -> None:
            world = World(service, host)
            try:
                await scene(world)
            finally:
                await world.close()

        with capture_logs() as logs:
            run(whole())
        return logs

    return play_scene
