"""Asks for answers and does nothing but note when each token came.

Times are CLOCK_MONOTONIC in ns, which the daemons' timings share: every process of a host reads it.
"""

from __future__ import annotations

import asyncio
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from protocol.async_client import AsyncClient
from protocol.errors import ProtocolError, RequestError
from protocol.messages import End, Tokens
from protocol.resuming import Loss, ResumePolicy
from shared.cli.bench_plan import Ask
from shared.cli.program import exit_code
from shared.clock import NS_PER_MS, NS_PER_S
from shared.errors import ExitCode

if TYPE_CHECKING:
    from protocol.messages import DeviceTimings, HandoffTimings

NUM_SPECIAL_IDS = 300
"""A vocabulary's first ids are bytes and marks with a meaning of their own; prompts leave them."""

SPIN_S = 0.002
"""How long before a request is due its client stops to sleep: timers count whole milliseconds."""

Listener = Callable[["Heard"], None]
"""Told of each request that is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a request has no answer."""

    code: str
    """An ERROR's code, or the kind of what else went wrong: `connection-lost`."""
    message: str
    exit_code: ExitCode
    """How a command ends whose only request this was."""

    @classmethod
    def of(cls, error: ProtocolError | RequestError) -> Failure:
        """Return what an error says."""
        kind = re.sub(r"(?<!^)(?=[A-Z])", "-", type(error).__name__.removesuffix("Error")).lower()
        return cls(
            code=error.code if isinstance(error, RequestError) else kind,
            message=" ".join(str(error).split()),
            exit_code=exit_code(error),
        )

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one request brought."""

    ask: Ask
    due_ns: int = 0
    """When it should have been sent; without a rate, when it was."""
    sent_ns: int = 0
    token_ns: array[int] = field(default_factory=lambda: array("q"))
    """When each token arrived; those of one frame arrive together."""
    end: End | None = None
    failure: Failure | None = None
    is_cut: bool = False
    """Whether its client was told to stop before the answer was whole."""
    num_resumptions: int = 0
    """How often it broke off and was gone on with."""

    @property
    def ttft_ms(self) -> float:
        """From when the request was due to its first token."""
        return (self.token_ns[0] - self.due_ns) / NS_PER_MS

    @property
    def gap_ms(self) -> float:
        """From the first token to the second: the hand-over, as its client sees it."""
        return (self.token_ns[1] - self.token_ns[0]) / NS_PER_MS

    @property
    def itls_ms(self) -> list[float]:
        """Gaps between tokens from the second on."""
        return [(later - earlier) / NS_PER_MS for earlier, later in pairwise(self.token_ns[1:])]

    @property
    def first_token_ns(self) -> int:
        """When prefilld knew the first token; 0 where the answer is not whole."""
        return 0 if self.end is None else self.end.timings_ms.first_token_ns

    @property
    def handoff_ms(self) -> dict[str, float]:
        """Stages of the hand-over since then; none where nothing was handed over."""
        return _told(None if self.end is None else self.end.timings_ms.handoff)

    @property
    def device_ms(self) -> dict[str, float]:
        """How long GPUs were at each stage, where one was."""
        return _told(None if self.end is None else self.end.timings_ms.device)


def _told(timings: HandoffTimings | DeviceTimings | None) -> dict[str, float]:
    told: dict[str, float | None] = {} if timings is None else msgspec.structs.asdict(timings)
    return {name: at_ms for name, at_ms in told.items() if at_ms is not None}


async def hear_all(
    socket: str | Path,
    asks: Sequence[Ask],
    *,
    vocab_size: int,
    begin_ns: int,
    concurrency: int,
    on_heard: Listener,
    is_open: bool = True,
) -> None:
    """Send requests when they are due and hear them out.

    Args:
        socket: prefilld's.
        asks: In the order in which they are due.
        vocab_size: Of which prompts are made.
        begin_ns: What `start_s` counts from.
        concurrency: Requests at a time; one that is due waits for its turn.
        on_heard: Told of each request that is over; also of those that are cut where this is
            cancelled, and never of those that were not sent.
        is_open: Whether requests are due at their times, so that waiting for a turn is waiting;
            else they are due when their turn has come.
    """
    waiting = iter(asks)

    async def work() -> None:
        for ask in waiting:
            prompt = prompt_of(ask, vocab_size)
            due_ns = begin_ns + round(ask.start_s * NS_PER_S)
            await _sleep_until(due_ns)
            heard = Heard(ask=ask, sent_ns=time.monotonic_ns())
            heard.due_ns = due_ns if is_open else heard.sent_ns
            try:
                await _hear(socket, prompt, heard)
            except asyncio.CancelledError:
                heard.is_cut = True
                raise
            finally:
                on_heard(heard)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(asks))):
            group.create_task(work())


async def _hear(socket: str | Path, prompt: list[int], heard: Heard) -> None:
    def count(_loss: Loss) -> None:
        heard.num_resumptions += 1

    client = AsyncClient(socket, resume_policy=ResumePolicy(on_loss=count))
    name = f"bench-{heard.ask.seed}"
    try:
        stream = await client.stream(
            prompt, max_tokens=heard.ask.num_tokens, ignore_eos=True, id=name
        )
        async with stream:
            async for event in stream:
                now_ns = time.monotonic_ns()
                if isinstance(event, Tokens):
                    heard.token_ns.extend([now_ns] * len(event.ids))
                elif isinstance(event, End):
                    heard.end = event
    except (ProtocolError, RequestError) as error:
        heard.failure = Failure.of(error)


async def _sleep_until(due_ns: int) -> None:
    """Wait for a moment to within some microseconds, and let others work meanwhile."""
    while (left_s := (due_ns - time.monotonic_ns()) / NS_PER_S) > 0:  # noqa: ASYNC110  it is time
        await asyncio.sleep(max(0.0, left_s - SPIN_S))


def prompt_of(ask: Ask, vocab_size: int) -> list[int]:
    """Return a request's prompt as token ids."""
    own = ask.num_prompt_tokens - ask.num_shared_tokens
    shared = _random_ids(ask.shared_seed, ask.num_shared_tokens, vocab_size)
    return shared + _random_ids(ask.seed, own, vocab_size)


def _random_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    first = min(NUM_SPECIAL_IDS, vocab_size // 2)
    ids: list[int] = np.random.default_rng(seed).integers(first, vocab_size, size=count).tolist()
    return ids
