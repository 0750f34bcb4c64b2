"""The prefill loop: gives prompts their blocks, computes them step by step, tells what is there.

The engine thread only executes the steps that this decides.  Where the engine allows it, a step is
launched while the one before runs, and decoded hears of its blocks at once, with the event to wait
for: it pulls a chunk while the next one is computed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from prefilld.prefill import launch_chunks, wait_for_chunks
from prefilld.request import Request, RequestState
from shared.clock import whole_us
from shared.engine.device_timing import add_device_ns

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from prefilld.handoff import HandoffDesk
    from prefilld.metrics import PrefillMetrics
    from prefilld.scheduler import Chunk, Scheduler
    from shared.clock import Clock
    from shared.engine.collected import Collected
    from shared.engine.prefilling import Prefiller
    from shared.engine.thread import EngineThread
    from shared.kv.control_page import ControlPage
    from shared.kv.holds import BlockHolds


class PromptOwner(Protocol):
    """Who keeps the requests whose prompts are computed."""

    def end_cancelled(self) -> None:
        """End what is to end and what no step computes; asked before each step."""

    def is_cancelled(self, request: Request) -> bool:
        """Whether a request is to end before the next step."""

    def first_token(self, request: Request, token_id: int) -> None:
        """A prompt is computed, and this is the answer's first token."""


class PrefillLoop:
    """Computes what the scheduler says, for ever.

    Args:
        prefiller: What computes, over prefilld's pool.
        engine: The thread it runs on.
        scheduler: Which prompts wait, and which compute how much next.
        holds: Who has which blocks of the pool.
        control_page: Where first tokens are told.
        desk: Told of every block that decoded may pull.
        owner: Who keeps the requests.
    """

    def __init__(
        self,
        *,
        prefiller: Prefiller,
        engine: EngineThread,
        scheduler: Scheduler[Request],
        holds: BlockHolds,
        control_page: ControlPage,
        desk: HandoffDesk,
        owner: PromptOwner,
        metrics: PrefillMetrics,
        clock: Clock,
        log: FilteringBoundLogger,
    ) -> None:
        self._prefiller, self._engine = prefiller, engine
        self._scheduler, self._holds, self._page = scheduler, holds, control_page
        self._desk, self._owner = desk, owner
        self._metrics, self._clock, self._log = metrics, clock, log
        self._in_flight: deque[list[Chunk[Request]]] = deque()
        """The chunks of steps that are launched and not collected."""
        self._step_began_ns = 0
        """When the oldest step in flight had the engine to itself."""
        self._work = asyncio.Event()

    def wake(self) -> None:
        """Look again: a request came, blocks came free, or a request is to end."""
        self._work.set()

    async def run(self) -> None:
        """Compute what there is to compute, for ever."""
        while True:
            self._work.clear()
            self._owner.end_cancelled()
            self._admit()
            has_room = len(self._in_flight) < self._prefiller.depth
            chunks = self._scheduler.next_step() if has_room else []
            if chunks:
                await self._launch(chunks)
            elif self._in_flight:
                await self._collect()
            else:
                await self._work.wait()

    def _admit(self) -> None:
        while (request := self._scheduler.admit(self._take_blocks)) is not None:
            request.state = RequestState.RUNNING
            self._desk.announce(request)  # what the prefix cache had, decoded may pull at once

    def _take_blocks(self, request: Request) -> bool:
        hold = self._holds.take(request.num_tokens, request.prompt.block_hashes)
        if hold is None:
            return False
        request.hold = hold
        request.launched_tokens = request.computed_tokens = hold.cached_tokens
        return True

    async def _launch(self, chunks: list[Chunk[Request]]) -> None:
        """Begin a step, and tell decoded what it will bring."""
        now_ns = self._clock.monotonic_ns()
        for chunk in chunks:
            chunk.request.started_ns = chunk.request.started_ns or now_ns
            chunk.request.launched_tokens += chunk.length
            chunk.request.num_in_flight += 1
        if not self._in_flight:
            self._step_began_ns = now_ns
        self._in_flight.append(chunks)
        event = await self._engine.run(launch_chunks, self._prefiller, chunks)
        if event is None:
            return  # computed already; `_collect` is next
        for chunk in chunks:
            if not self._owner.is_cancelled(chunk.request):
                self._desk.announce(chunk.request, event)

    async def _collect(self) -> None:
        """Wait for the oldest step; come back without it if there is something to launch."""
        chunks = self._in_flight[0]
        collected = await self._engine.run(
            wait_for_chunks, self._prefiller, chunks, self._page, self._work.is_set
        )
        if collected is None:
            return
        now_ns = self._clock.monotonic_ns()
        self._in_flight.popleft()
        # Tokens and hand-overs before numbers: somebody waits for them.
        for chunk, token_id in zip(chunks, collected.token_ids, strict=True):
            request = chunk.request
            request.prefill_device_ns = add_device_ns(
                request.prefill_device_ns, collected.device_ns
            )
            self._computed(chunk, token_id)
        self._desk.pump()
        self._metrics.stepped(
            num_tokens=sum(chunk.length for chunk in chunks),
            duration_ns=now_ns - self._step_began_ns,
            device_ns=collected.device_ns,
        )
        self._tell(chunks, collected, duration_ns=now_ns - self._step_began_ns)
        self._step_began_ns = now_ns

    def _tell(
        self,
        chunks: list[Chunk[Request]],
        collected: Collected[int | None],
        *,
        duration_ns: int,
    ) -> None:
        for chunk in chunks:
            self._log.debug(
                "chunk.computed",
                request_id=chunk.request.id,
                num_tokens=chunk.length,
                step_us=whole_us(duration_ns),
                device_us=whole_us(collected.device_ns),
                written_us=whole_us(collected.written_ns),
            )

    def _computed(self, chunk: Chunk[Request], token_id: int | None) -> None:
        request = chunk.request
        request.computed_tokens += chunk.length
        request.num_in_flight -= 1
        if request.state is RequestState.ENDED:
            return  # at the daemon's end, while its step ran
        assert request.hold is not None, "it had blocks to compute into"
        self._holds.computed(request.hold, request.computed_tokens)
        if self._owner.is_cancelled(request):
            return  # it ends before the next step
        if token_id is None:
            self._desk.announce(request)
            return
        self._scheduler.remove(request)
        self._owner.first_token(request, token_id)
