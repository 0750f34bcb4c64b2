"""Asks many prompts, some at a time, each on a connection and a thread of its own.

Threads only ask; whoever iterates over the results owns the files and the progress.  A daemon that
is full is asked again after the time it names; without any daemon nothing more is asked.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol.client import Client
from protocol.errors import (
    ListenQueueFullError,
    ProtocolError,
    RequestError,
    UnixSocketError,
)
from protocol.exchange import Options
from shared.cli.prompt_file import BrokenLineError, PromptLine, parse_line
from shared.cli.received import Received, describe_error

MAX_ATTEMPTS = 20
"""How often one prompt is asked of a daemon that says it is full."""

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
"""Bounds on the pause before the next attempt, whatever the daemon names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineResult:
    """What came of one line."""

    line: PromptLine
    answer: dict[str, object]
    """For the file of answers; has `error` where it failed."""

    @property
    def fault(self) -> str | None:
        """What went wrong, in one line; None where nothing did."""
        error = self.answer.get("error")
        return " ".join(str(error["message"]).split()) if isinstance(error, dict) else None


class PromptRunner:
    """Asks lines as they come.

    Args:
        client: Whom to ask; each request gets a connection of its own.
        defaults: What a request says where its line says nothing.
        concurrency: Requests at a time, at least 1.
        wait: Pauses before another attempt.
    """

    def __init__(
        self,
        client: Client,
        defaults: Options,
        *,
        concurrency: int,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self._client, self._defaults, self._wait = client, defaults, wait
        self._concurrency = concurrency

    def run(self, lines: Iterator[PromptLine]) -> Iterator[LineResult]:
        """Ask every line; yield what came of each, in the order in which they end.

        Lines are taken as there is room for them.  Whoever stops iterating leaves what runs: the
        threads end with the process, and to the daemon a closed connection is a cancel.

        Raises:
            UnixSocketError: No daemon can be reached.
        """
        # One more than can run: the next line is there as soon as a thread is.
        waiting: queue.Queue[PromptLine | None] = queue.Queue(self._concurrency + 1)
        results: queue.Queue[LineResult | Exception] = queue.Queue()
        threads = [
            threading.Thread(target=self._work, args=(waiting, results), daemon=True)
            for _ in range(self._concurrency)
        ]
        for thread in threads:
            thread.start()
        num_open, is_all = 0, False
        while num_open or not is_all:
            while not is_all and num_open <= self._concurrency:
                line = next(lines, None)
                if line is None:
                    is_all = True
                else:
                    waiting.put(line)
                    num_open += 1
            if num_open:
                result = results.get()
                if isinstance(result, Exception):
                    raise result
                num_open -= 1
                yield result
        for _ in threads:
            waiting.put(None)

    def _work(
        self,
        waiting: queue.Queue[PromptLine | None],
        results: queue.Queue[LineResult | Exception],
    ) -> None:
        while (line := waiting.get()) is not None:
            try:
                results.put(LineResult(line=line, answer=self._answer(line)))
            except Exception as error:  # the thread's border: whoever iterates raises it
                results.put(error)
                return

    def _answer(self, line: PromptLine) -> dict[str, object]:
        head: dict[str, object] = {"line": line.number, "input": line.digest}
        try:
            prompt, options = parse_line(line, self._defaults)
        except BrokenLineError as error:
            return head | {"error": {"code": "broken-line", "message": str(error)}}
        for attempt in range(1, MAX_ATTEMPTS + 1):
            received = Received(began_s=time.monotonic())
            try:
                with self._client.stream(prompt, **options) as stream:
                    for event in stream:
                        received.add(event, now_s=time.monotonic())
            except RequestError as error:
                if error.retryable and received.accepted is None and attempt < MAX_ATTEMPTS:
                    self._wait(min(max(error.retry_after_ms / 1e3, MIN_RETRY_S), MAX_RETRY_S))
                    continue
                return head | {"error": describe_error(error)}
            except ListenQueueFullError as error:
                if attempt == MAX_ATTEMPTS:
                    return head | {"error": describe_error(error)}
                self._wait(MIN_RETRY_S * attempt)
                continue
            except UnixSocketError:
                raise
            except ProtocolError as error:
                return head | {"error": describe_error(error)}
            return head | received.as_json()
        raise AssertionError("the last attempt returns")
