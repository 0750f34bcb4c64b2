"""The model of the everyday tests, and the process that its answers are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.even_model import write_even_model
from tests.support.link_peers import load_host
from tests.support.solo import SoloEngine

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model, as a file."""
    return write_even_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine(model: Path) -> SoloEngine:
    """The same model in one process on the CPU."""
    torch.set_num_threads(1)
    return SoloEngine(load_host(model))
