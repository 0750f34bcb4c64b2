"""Builds what decoded is made of, once: model, engine, batch, books, loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from decoded.adoption import AdoptionDesk
from decoded.decode_engine import make_decode_engine
from decoded.decode_loop import DecodeLoop
from decoded.overview import Overview
from decoded.scheduler import Scheduler
from decoded.sequence import Sequence
from decoded.sequences import SequenceBook
from decoded.swap_desk import SwapDesk
from shared.daemon.model_host import ModelHost, bring_up
from shared.engine.workspace import decode_workspace_bytes
from shared.kv.allocator import BlockAllocator

if TYPE_CHECKING:
    from decoded.metrics import DecodeMetrics
    from decoded.turns import Turns
    from shared.daemon.devices import Device
    from shared.engine.thread import EngineThread
    from shared.service.frame import Service


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """What there is once the model is loaded."""

    host: ModelHost
    device: Device
    turns: Turns
    allocator: BlockAllocator
    arena: BlockAllocator | None
    scheduler: Scheduler[Sequence]
    book: SequenceBook
    desk: AdoptionDesk
    overview: Overview

    @property
    def is_idle(self) -> bool:
        """Whether nothing is adopted, and no room is promised to what prefilld still computes."""
        return self.book.is_idle and not self.desk.links.has_reservations


async def assemble(service: Service, engine: EngineThread, metrics: DecodeMetrics) -> Parts:
    """Load the model, build everything that serves it, and begin to take turns.

    Args:
        service: The frame that the daemon runs in.
        engine: Its engine thread; the model is loaded there.
        metrics: Where everybody counts.

    Raises:
        ModelError: The model is missing, damaged or of a kind that cannot be run.
        EnvironmentUnsupportedError: This machine lacks what the configured device needs, or memory.
        MemoryShortageError: Others hold the memory.
    """
    config = service.config
    host = await engine.run(
        bring_up,
        config,
        "decoded",
        workspace=partial(decode_workspace_bytes, max_batch=config.decoded.max_batch),
        log=service.log,
        progress=service.loaded,
    )
    computing = await engine.run(make_decode_engine, host, host.device, config)
    allocator = BlockAllocator(host.layout.num_blocks)
    arena = None
    if computing.arena is not None:
        arena = BlockAllocator(computing.arena.layout.num_blocks)
    elif config.decoded.swap_gib:
        service.log.warning("arena.missing", reason=computing.arena_fault)
    scheduler: Scheduler[Sequence] = Scheduler(
        allocator=allocator, max_batch=config.decoded.max_batch, arena=arena
    )
    loop: DecodeLoop

    def wake() -> None:
        loop.wake()

    book = SequenceBook(
        service=service,
        scheduler=scheduler,
        metrics=metrics,
        decode=host.tokenizer.decode,
        on_work=wake,
    )
    desk = AdoptionDesk(
        service=service,
        scheduler=scheduler,
        book=book,
        metrics=metrics,
        token_bytes=host.tokenizer.token_bytes,
        block_size=host.layout.block_size,
        on_work=wake,
    )
    swaps = SwapDesk(
        service=service,
        scheduler=scheduler,
        book=book,
        metrics=metrics,
        block_bytes=host.layout.block_bytes,
    )
    loop = DecodeLoop(
        turns=computing.turns,
        engine=engine,
        layout=host.layout,
        scheduler=scheduler,
        desk=desk,
        swaps=swaps,
        book=book,
        metrics=metrics,
    )
    overview = Overview(
        scheduler=scheduler,
        book=book,
        desk=desk,
        allocator=allocator,
        layout=host.layout,
        arena=arena,
        clock=service.clock,
    )
    overview.declare(service.metrics)
    parts = Parts(
        host=host,
        device=host.device,
        turns=computing.turns,
        allocator=allocator,
        arena=arena,
        scheduler=scheduler,
        book=book,
        desk=desk,
        overview=overview,
    )
    service.spawn(loop.run(), name="decode")
    service.log.info(
        "model.loaded",
        **host.summary(),
        swap_blocks=0 if arena is None else arena.num_blocks - 1,
        pool_s=round(computing.pool_s, 3),
    )
    return parts
