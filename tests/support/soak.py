"""Runs random requests against a pair, many at once, and keeps what each client saw."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from protocol.async_client import AsyncClient
from protocol.errors import ConnectionLostError, RequestError
from protocol.messages import Accepted, End, Tokens
from protocol.resuming import ResumePolicy
from tests.support.soak_plans import Conduct

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.async_client import AsyncAnswerStream
    from protocol.exchange import Event
    from protocol.messages import Resume, TokenLogprob
    from tests.support.pair import Pair
    from tests.support.soak_plans import Plan

TIMEOUT_S = 120.0
"""Longest silence of a stream; a test that reaches it has failed."""

RELEASED_S = 1.0
"""How soon a request that nobody wants any more is nobody's."""

PAUSE_S = 0.02
"""Of a slow reader, behind each message."""

WATCH_INTERVAL_S = 0.1
POLL_S = 0.02

NO_RESUMING = ResumePolicy(max_attempts=0)
"""Nobody dies here, so an answer that breaks off is a fault, or what a half-close is told."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What one client saw of its request."""

    plan: Plan
    accepted: Accepted | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None
    left: bool = False
    """Whether it left before END."""
    num_busy: int = 0
    """How often it was told to come back later."""


class Soak:
    """Clients of one pair.

    Args:
        pair: Running.
        concurrency: Most requests at once.
    """

    def __init__(self, pair: Pair, *, concurrency: int) -> None:
        self._client = AsyncClient(pair.socket, timeout_s=TIMEOUT_S, resume_policy=NO_RESUMING)
        self._daemons = (self._client, AsyncClient(pair.decoded_socket, timeout_s=TIMEOUT_S))
        self._concurrency = concurrency

    def run(self, plans: Sequence[tuple[Plan, Resume | None]]) -> list[Outcome]:
        """Carry plans out and return what came of them, in their order.

        Raises:
            AssertionError: A client that left was not forgotten in time, or blocks of a pool did
                not add up at some moment.
            RequestError: A request was refused.
            ConnectionLostError: An answer broke off.
        """
        return asyncio.run(self._run(plans))

    async def _run(self, plans: Sequence[tuple[Plan, Resume | None]]) -> list[Outcome]:
        outcomes = [Outcome(plan=plan) for plan, _ in plans]
        waiting = iter(list(zip(outcomes, plans, strict=True)))

        async def serve() -> None:
            for outcome, (_, resume) in waiting:
                await self._until_taken(outcome, resume)

        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch())
            await asyncio.wait([group.create_task(serve()) for _ in range(self._concurrency)])
            watcher.cancel()
        return outcomes

    async def _until_taken(self, outcome: Outcome, resume: Resume | None) -> None:
        while True:
            try:
                await self._follow(outcome, resume)
            except RequestError as error:
                if error.code != "busy":
                    raise
                outcome.num_busy += 1
                if outcome.left:
                    return
                await asyncio.sleep(error.retry_after_ms / 1e3)
            else:
                return

    async def _follow(self, outcome: Outcome, resume: Resume | None) -> None:
        """Ask, and read until END or until the client leaves."""
        plan = outcome.plan
        left_s = None
        if plan.leaves_after_s is not None:
            left_s = asyncio.get_running_loop().time() + plan.leaves_after_s
        async with await self._client.stream(
            plan.prompt, id=plan.id, resume=resume, **plan.options
        ) as stream:
            while outcome.end is None:
                event = await _next_event(stream, left_s)
                if event is None or _is_enough(outcome, event):
                    left_s = None
                    await self._leave(outcome, stream)
                    break
                if plan.conduct is Conduct.DAWDLE:
                    await asyncio.sleep(PAUSE_S)
        if outcome.left:
            await self._until_forgotten(plan.id)

    async def _leave(self, outcome: Outcome, stream: AsyncAnswerStream) -> None:
        """Leave in the way that is planned, and see what comes of it."""
        if outcome.end is not None:  # too late
            return
        outcome.left = True
        match outcome.plan.conduct:
            case Conduct.CANCEL:
                await stream.cancel()
                async for event in stream:
                    _note(outcome, event)
                assert outcome.end is not None
            case Conduct.HALF_CLOSE:
                assert stream._call is not None
                stream._call._socket.shutdown(socket.SHUT_WR)
                try:
                    async for event in stream:
                        _note(outcome, event)
                except ConnectionLostError:
                    return  # its end is all that it is told
            case _:
                stream.close()

    async def _until_forgotten(self, request_id: str) -> None:
        """Wait until neither daemon has a request; while one has, it has the blocks."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + RELEASED_S
        while True:
            began_s = loop.time()
            holders = [await daemon.status() for daemon in self._daemons]
            if not any(request_id in _ids_in(status) for status in holders):
                return
            assert began_s < deadline_s, f"{request_id} is served {RELEASED_S:g} s after it left"
            await asyncio.sleep(POLL_S)

    async def _watch(self) -> None:
        """Look at both pools again and again: at every moment each block is in one state."""
        while True:
            for daemon in self._daemons:
                status: dict[str, Any] = await daemon.status()
                check_sum(status["pool"])
            await asyncio.sleep(WATCH_INTERVAL_S)


def check_sum(pool: dict[str, int]) -> None:
    """Fail unless a pool's blocks add up."""
    states = ("reserved", "free", "cached", "active", "leased", "quarantined")
    assert sum(pool[state] for state in states) == pool["total"], pool
    assert min(pool.values()) >= 0, pool


async def _next_event(stream: AsyncAnswerStream, left_s: float | None) -> Event | None:
    """Return the next event, or None where the time to leave comes first."""
    try:
        async with asyncio.timeout_at(left_s) as patience:
            return await anext(stream)
    except TimeoutError:
        if not patience.expired():
            raise
        return None


def _is_enough(outcome: Outcome, event: Event) -> bool:
    """Take note of an event, and tell whether the client leaves behind it."""
    _note(outcome, event)
    after = outcome.plan.leaves_after_tokens
    return after is not None and len(outcome.ids) >= after


def _note(outcome: Outcome, event: Event) -> None:
    match event:
        case Accepted():
            outcome.accepted = event
        case Tokens():
            outcome.ids += event.ids
            outcome.text += event.text
            outcome.logprobs += event.logprobs or ()
        case End():
            outcome.end = event


def _ids_in(status: dict[str, Any]) -> set[str]:
    return {row["id"] for row in status["requests"]["first"]}
