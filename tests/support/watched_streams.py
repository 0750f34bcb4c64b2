"""Streams that are watched while daemons die under them: what arrived, in which order, and when."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.client import Client
from protocol.messages import End, Sampling, Tokens
from protocol.resuming import ResumePolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from protocol.resuming import Loss

TIMEOUT_S = 120.0
"""Longest silence of a stream; a test that reaches it has failed."""


GREEDY = Sampling(seed=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ask:
    """What one stream asks for.  Compared by identity."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = GREEDY


@dataclass(slots=True, kw_only=True)
class Delivered:
    """What one stream was given."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    end: End | None = None
    losses: list[Loss] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    """From each loss to the next token."""


class WatchedStreams:
    """Some requests at once, each on a thread of its own; a context manager that waits for them.

    Args:
        socket: prefilld's.
        asks: What to ask.
    """

    def __init__(self, socket: Path, asks: Sequence[Ask]) -> None:
        self.asks = tuple(asks)
        self._socket = socket
        self._moved = threading.Condition()
        self._num_tokens = 0
        self._num_done = 0
        self._pool = ThreadPoolExecutor(len(asks))
        self._futures: list[Future[Delivered]] = [self._pool.submit(self._run, ask) for ask in asks]

    def __enter__(self) -> WatchedStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def results(self) -> list[Delivered]:
        """Wait until every answer is whole, and return them."""
        return [future.result(timeout=TIMEOUT_S) for future in self._futures]

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until all streams together have got so many tokens, or have ended."""
        with self._moved:
            is_there = self._moved.wait_for(
                lambda: self._num_tokens >= num_tokens or self._num_done == len(self._futures),
                timeout=TIMEOUT_S,
            )
        assert is_there, f"{self._num_tokens} of {num_tokens} tokens came within {TIMEOUT_S:g} s"

    def _run(self, ask: Ask) -> Delivered:
        delivered, lost_at_s = Delivered(), 0.0

        def on_loss(loss: Loss) -> None:
            nonlocal lost_at_s
            lost_at_s = time.monotonic()
            delivered.losses.append(loss)

        client = Client(
            self._socket, timeout_s=TIMEOUT_S, resume_policy=ResumePolicy(on_loss=on_loss)
        )
        try:
            with client.stream(
                list(ask.prompt),
                max_tokens=ask.max_tokens,
                sampling=ask.sampling,
                ignore_eos=True,
            ) as stream:
                for event in stream:
                    if isinstance(event, End):
                        delivered.end = event
                    elif isinstance(event, Tokens):
                        assert event.index == len(delivered.ids)
                        delivered.ids += event.ids
                        delivered.text += event.text
                        if lost_at_s:
                            delivered.stalls_s.append(time.monotonic() - lost_at_s)
                            lost_at_s = 0.0
                        self._note(len(event.ids))
        finally:
            self._note(0, is_done=True)
        return delivered

    def _note(self, num_tokens: int, *, is_done: bool = False) -> None:
        with self._moved:
            self._num_tokens += num_tokens
            self._num_done += is_done
            self._moved.notify_all()
