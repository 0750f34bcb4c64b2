"""Whatever lets others watch a daemon from outside its sockets, for as long as it runs."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shared.daemon.metrics_http import metrics_over_http
from shared.tracing import Tracer, open_tracer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from structlog.typing import FilteringBoundLogger

    from shared.config.resolution import ResolvedConfig
    from shared.metrics import Metrics


@asynccontextmanager
async def watched(
    metrics: Metrics, *, name: str, resolved: ResolvedConfig, log: FilteringBoundLogger
) -> AsyncIterator[Tracer]:
    """Answer scrapers, and yield where traces go; both only where they are configured.

    Args:
        metrics: What scrapers are told.
        name: The daemon's.
        resolved: The configuration.
        log: Where it is said at which address scrapers are answered.

    Raises:
        ConfigError: Nothing can listen at the address, or traces cannot be sent to such a place.
        EnvironmentUnsupportedError: Another daemon has the socket, or the extra `otel` is missing.
    """
    tracer = open_tracer(resolved.config.trace.endpoint, daemon=name)
    try:
        async with metrics_over_http(metrics, name=name, resolved=resolved, log=log):
            yield tracer
    finally:
        await asyncio.to_thread(tracer.shutdown)
