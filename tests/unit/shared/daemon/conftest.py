"""Whose service the tests of this folder have."""

from __future__ import annotations

import pytest

from shared.service.frame import DaemonName


@pytest.fixture
def daemon_name() -> DaemonName:
    """Whose service the tests of this folder have."""
    return "prefilld"
