"""Event loops for the socket tests: each runs under asyncio's own loop and under uvloop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

DEADLINE_S = 20.0  # far beyond what any of these tests takes; a hang fails instead of stopping CI

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Return a function that runs a coroutine to its end on a fresh loop."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever it returns
        async def bounded() -> Any:  # noqa: ANN401 - as above
            async with asyncio.timeout(DEADLINE_S):
                return await coroutine

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(bounded())

    return run_to_end
