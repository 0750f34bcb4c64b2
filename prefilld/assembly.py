"""Builds what prefilld is made of, once: model, pool, leases, desk, link, reception."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from prefilld.admission import Bounds
from prefilld.casualties import Casualties
from prefilld.handoff import HandoffDesk
from prefilld.handshake import Exported
from prefilld.link import PrefillLink
from prefilld.overview import Overview
from prefilld.prefill_engine import make_prefill_engine
from prefilld.reception import Reception
from prefilld.serving import Serving
from protocol.limits import MAX_CONTROL_SLOTS
from shared.daemon.instance import this_instance
from shared.daemon.model_host import ModelHost, bring_up
from shared.engine.workspace import prefill_workspace_bytes
from shared.kv.allocator import BlockAllocator
from shared.kv.control_page import ControlPage
from shared.kv.holds import BlockHolds
from shared.kv.leases import LeaseTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.metrics import PrefillMetrics
    from shared.config import Config
    from shared.daemon.devices import Device
    from shared.engine.thread import EngineThread
    from shared.service.frame import Service


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What there is once the model is loaded."""

    host: ModelHost
    device: Device
    allocator: BlockAllocator
    holds: BlockHolds
    desk: HandoffDesk
    serving: Serving
    link: PrefillLink
    reception: Reception
    overview: Overview

    @property
    def is_idle(self) -> bool:
        """Whether no request is prefilld's and nothing is left to settle with decoded."""
        return self.reception.is_idle and self.serving.is_idle


async def assemble(
    service: Service,
    engine: EngineThread,
    epoch: bytes,
    metrics: PrefillMetrics,
    *,
    on_link_change: Callable[[], None],
    turns_away: Callable[[], bool],
) -> Parts:
    """Load the model and build everything that serves it.

    Args:
        service: The frame that the daemon runs in.
        engine: Its engine thread; the model is loaded there.
        epoch: Of the new pool.
        metrics: Where everybody counts.
        on_link_change: Called when the link opened or was lost.
        turns_away: Returns whether new requests are told `draining`.

    Raises:
        ModelError: The model is missing, damaged or of a kind that cannot be run.
        ChatTemplateError: The model's template is broken.
        EnvironmentUnsupportedError: This machine lacks what the configured device needs, or memory.
        MemoryShortageError: Others hold the memory.
    """
    config = service.config
    host = await engine.run(
        bring_up,
        config,
        "prefilld",
        workspace=partial(prefill_workspace_bytes, token_budget=config.prefilld.lone_budget),
        log=service.log,
        progress=service.loaded,
    )
    if host.template is not None:  # now, so that a template that is broken shows at the start
        await asyncio.to_thread(host.template.start)
    parts = await engine.run(
        make_prefill_engine,
        host,
        host.device,
        token_budget=config.prefilld.lone_budget,
        attention=config.prefilld.attention,
    )
    if host.device.index is not None:  # a CPU has no choice
        service.log.info(
            "attention.chosen",
            attention=parts.attention.name,
            because=parts.attention.because,
            measured_us=dict(parts.attention.measured_us),
        )
    num_blocks = host.layout.num_blocks
    allocator = BlockAllocator(num_blocks)
    holds = BlockHolds(allocator, block_size=host.layout.block_size)
    # Every lease has a block that was fresh when it was opened, so slots can never run out before
    # blocks do.
    num_slots = min(num_blocks, MAX_CONTROL_SLOTS)
    control_page = ControlPage.create(num_slots)
    desk = HandoffDesk(
        epoch=epoch,
        block_size=host.layout.block_size,
        leases=LeaseTable(num_slots),
        holds=holds,
        control_page=control_page,
        clock=service.clock,
        log=service.log,
        metrics=metrics,
    )
    casualties = Casualties()
    serving = Serving(
        service=service,
        prefiller=parts.prefiller,
        engine=engine,
        holds=holds,
        control_page=control_page,
        desk=desk,
        casualties=casualties,
        metrics=metrics,
    )
    desk.attach(serving)
    exported = Exported(
        pool=parts.pool,
        device=host.device,
        control_page=control_page,
        epoch=epoch,
        instance=this_instance(),
        host=host,
        engine=engine,
    )
    link = PrefillLink(
        service=service,
        exported=exported,
        desk=desk,
        casualties=casualties,
        metrics=metrics,
        on_change=on_link_change,
    )
    reception = Reception(
        service=service,
        epoch=epoch,
        host=host,
        serving=serving,
        casualties=casualties,
        metrics=metrics,
        bounds=lambda: _bounds(service.config, link, num_blocks),
        turns_away=turns_away,
    )
    service.log.info("model.loaded", **host.summary(), pool_s=round(parts.pool_s, 3))
    return Parts(
        host=host,
        device=host.device,
        allocator=allocator,
        holds=holds,
        desk=desk,
        serving=serving,
        link=link,
        reception=reception,
        overview=Overview(
            serving=serving,
            reception=reception,
            allocator=allocator,
            holds=holds,
            layout=host.layout,
            link_status=link.status,
            clock=service.clock,
        ),
    )


def _bounds(config: Config, link: PrefillLink, num_blocks: int) -> Bounds:
    """Return what a request must fit into; decoded's own word goes before its configuration.

    Before decoded has told and where its configuration leaves it open, its pool is held to be as
    large as ours.
    """
    return Bounds(  # block 0 of either pool is reserved
        prefill_blocks=num_blocks - 1,
        is_direct=link.is_direct,
        decode_blocks=link.peer_pool_blocks or (config.decoded.num_blocks or num_blocks) - 1,
        max_tokens_default=config.limits.max_tokens_default,
    )
