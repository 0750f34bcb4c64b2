"""Clients that do nothing but note when each token came; in processes of their own.

One Python process reads some tens of streams without being late; more would measure the reader.
Times are CLOCK_MONOTONIC in ns, which the daemons' timings share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from protocol.async_client import AsyncClient
from protocol.messages import DeviceTimings, End, HandoffTimings, Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

STREAMS_A_PROCESS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    num_prompt_tokens: int
    num_tokens: int
    start_s: float = 0.0
    """When to send it, after its process began."""
    seed: int = 0
    """Of the prompt's tokens."""


@dataclass(slots=True, kw_only=True)
class Heard:
    """What one request brought."""

    sent_ns: int = 0
    token_ns: list[int] = field(default_factory=list)
    """When each token arrived."""
    ids: list[int] = field(default_factory=list)
    first_token_ns: int = 0
    """When prefilld knew the first one."""
    handoff_ms: dict[str, float] = field(default_factory=dict)
    """Stages of the hand-off since then."""
    device_ms: dict[str, float] = field(default_factory=dict)
    """How long GPUs were at each of its stages, where one was."""
    failure: str = ""

    @property
    def ttft_ms(self) -> float:
        """From the request to its first token."""
        return (self.token_ns[0] - self.sent_ns) / 1e6

    @property
    def gap_ms(self) -> float:
        """From the first token to the second."""
        return (self.token_ns[1] - self.token_ns[0]) / 1e6

    @property
    def itls_ms(self) -> list[float]:
        """Gaps between tokens from the second on."""
        return [(later - earlier) / 1e6 for earlier, later in pairwise(self.token_ns[1:])]


def prompt_of(ask: Ask, vocab_size: int) -> list[int]:
    """Return a prompt that no other request shares, without a vocabulary's first, special ids."""
    source, first = random.Random(ask.seed), min(300, vocab_size // 2)
    return [source.randrange(first, vocab_size) for _ in range(ask.num_prompt_tokens)]


def _told(timings: HandoffTimings | DeviceTimings | None) -> dict[str, float]:
    fields: dict[str, float | None] = {} if timings is None else msgspec.structs.asdict(timings)
    return {name: ms for name, ms in fields.items() if ms is not None}


async def _hear(client: AsyncClient, ask: Ask, prompt: list[int], began_s: float) -> Heard:
    heard = Heard()
    await asyncio.sleep(max(0.0, began_s + ask.start_s - time.monotonic()))
    heard.sent_ns = time.monotonic_ns()
    try:
        stream = await client.stream(
            list(prompt), max_tokens=ask.num_tokens, ignore_eos=True, id=f"bench-{ask.seed}"
        )
        async with stream:
            async for event in stream:
                now_ns = time.monotonic_ns()
                if isinstance(event, Tokens):
                    heard.token_ns += [now_ns] * len(event.ids)
                    heard.ids += event.ids
                elif isinstance(event, End):
                    heard.first_token_ns = event.timings_ms.first_token_ns
                    heard.handoff_ms = _told(event.timings_ms.handoff)
                    heard.device_ms = _told(event.timings_ms.device)
    except Exception as error:
        heard.failure = f"{type(error).__name__}: {error}"
    return heard


def hear_all(socket: str, asks: Sequence[Ask], vocab_size: int, begin_s: float) -> list[Heard]:
    """Send requests at their times and hear them out.  Runs in a process of its own."""

    async def whole() -> list[Heard]:
        client = AsyncClient(Path(socket), timeout_s=300)
        prompts = [prompt_of(ask, vocab_size) for ask in asks]
        return list(
            await asyncio.gather(
                *(
                    _hear(client, ask, prompt, begin_s)
                    for ask, prompt in zip(asks, prompts, strict=True)
                )
            )
        )

    return uvloop.run(whole())


class Clients:
    """A pool of client processes; a context manager."""

    def __init__(self, socket: Path, *, vocab_size: int, num_processes: int) -> None:
        self._socket, self._vocab_size = str(socket), vocab_size
        self._num_processes = num_processes
        self._pool = ProcessPoolExecutor(
            num_processes, mp_context=multiprocessing.get_context("spawn")
        )

    def __enter__(self) -> Clients:
        for future in [self._pool.submit(time.sleep, 0.5) for _ in range(self._num_processes)]:
            future.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, asks: Sequence[Ask], *, lead_s: float = 1.0) -> list[Future[list[Heard]]]:
        """Send requests from all processes; their clocks start together, `lead_s` from now."""
        begin_s = time.monotonic() + lead_s
        shares = [list(asks[index :: self._num_processes]) for index in range(self._num_processes)]
        return [
            self._pool.submit(hear_all, self._socket, share, self._vocab_size, begin_s)
            for share in shares
            if share
        ]

    def hear(self, asks: Sequence[Ask], *, lead_s: float = 1.0) -> list[Heard]:
        """Send requests and wait for all of their answers.

        Raises:
            RuntimeError: One failed.
        """
        heard = [each for future in self.begin(asks, lead_s=lead_s) for each in future.result()]
        for each in heard:
            if each.failure:
                raise RuntimeError(each.failure)
        return heard
