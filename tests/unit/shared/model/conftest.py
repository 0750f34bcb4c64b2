"""Fixtures of the model's tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shared.model.fetch import fetch_model


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The embedded model's file, fetched on first use."""
    return fetch_model("smollm2-135m-instruct", notify=lambda line: print(line, file=sys.stderr))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """A valid file of the tiny model."""
    from tests.support.tiny_gguf import TinyGguf

    return TinyGguf().write(tmp_path / "tiny.gguf")
