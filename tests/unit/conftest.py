"""What the daemons' unit tests have in common: a service, and a model that was loaded once.

Each folder's own conftest.py says by `daemon_name` whose service it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.daemon.model_host import ModelHost
from shared.service.frame import DaemonName
from tests.support.tiny_gguf import TinyGguf
from tests.unit.shared.daemon.kit import RecordingService, load_host

MakeService = Callable[..., RecordingService]


@pytest.fixture
def make_service(tmp_path: Path, daemon_name: DaemonName) -> Iterator[MakeService]:
    """Make services of `daemon_name` with settings (`link__ping_interval_s=1`); none may fail."""
    made: list[RecordingService] = []

    def make(**settings: object) -> RecordingService:
        by_key = {name.replace("__", "."): value for name, value in settings.items()}
        made.append(RecordingService(daemon_name, tmp_path, by_key))
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
