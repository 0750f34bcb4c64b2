"""Which prompt computes how many tokens next: first come first served, in chunks.  Pure.

Theory of operation.  A request waits in one queue until its blocks are free, then it runs: each
step computes a chunk of one or more running prompts, `token_budget` tokens in all.  Nobody
overtakes at the door (the head of the queue gets the next free blocks, so it cannot starve),
but inside, no prompt may block another for long: while others run behind it, a prompt takes at
most half of what is left of the step's budget.  A short prompt behind a long one so waits for
its share of a step, not for the whole long prompt; the last in line may take all that is left.

A prompt that nobody runs beside takes larger chunks, which waste less; whoever comes then waits
for those that are under way.  Its last chunk is small again, since what it leaves to hand over is
what the client waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

WHOLE = 512
"""Where a chunk begins at a multiple of it, attention over what was before comes in whole pieces
(`shared.ops.triton.prefill_attention`)."""


class Schedulable(Protocol):
    """What the scheduler must know of a request."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute in all."""

    @property
    def launched_tokens(self) -> int:
        """Tokens whose computation was begun, or which the prefix cache had."""


R = TypeVar("R", bound=Schedulable)


class QueueFullError(Exception):
    """As many requests wait as may wait; nothing was queued."""

    def __init__(self, max_waiting: int) -> None:
        super().__init__(f"{max_waiting} requests are waiting already")
        self.max_waiting = max_waiting


@dataclass(frozen=True, slots=True)
class Chunk(Generic[R]):
    """Tokens `start` to `start + length` of one request's prompt."""

    request: R
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is computed once this chunk is."""
        return self.start + self.length == self.request.num_tokens


class Scheduler(Generic[R]):
    """Two queues and a token budget.

    Args:
        token_budget: Tokens of one step, over all its chunks; at least 1.
        lone_budget: The same of a step of one prompt that is alone, and that it does not end; at
            least `token_budget`, which it is by default.
        max_waiting: Requests that may wait for blocks.
        max_running: Requests that may hold blocks and compute.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        lone_budget: int | None = None,
        max_waiting: int,
        max_running: int,
    ) -> None:
        self._token_budget = token_budget
        self._lone_budget = lone_budget or token_budget
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._waiting: deque[R] = deque()
        self._running: list[R] = []

    @property
    def num_waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with blocks whose prompts are not computed yet."""
        return len(self._running)

    @property
    def waiting(self) -> tuple[R, ...]:
        """The queue, oldest first."""
        return tuple(self._waiting)

    def add(self, request: R) -> None:
        """Queue a request behind all others.

        Raises:
            QueueFullError: `max_waiting` requests wait already.
        """
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(self._max_waiting)
        self._waiting.append(request)

    def admit(self, take_blocks: Callable[[R], bool]) -> R | None:
        """Move the oldest waiting request to the running ones if it gets its blocks.

        Args:
            take_blocks: Takes the blocks of a request, or returns False where there are too few.
        """
        if not self._waiting or len(self._running) >= self._max_running:
            return None
        if not take_blocks(self._waiting[0]):
            return None
        request = self._waiting.popleft()
        self._running.append(request)
        return request

    def next_step(self) -> list[Chunk[R]]:
        """Return the chunks of the next step, oldest request first; empty when nothing runs.

        Their lengths add up to at most `token_budget`, or `lone_budget` where there is one, and
        each is at least 1.
        """
        chunks: list[Chunk[R]] = []
        left = self._token_budget
        unfinished = [each for each in self._running if each.launched_tokens < each.num_tokens]
        if len(unfinished) == 1:
            left = self._lone_length(unfinished[0])
        for index, request in enumerate(unfinished):
            if left == 0:
                break
            is_last_in_line = index == len(unfinished) - 1
            share = left if is_last_in_line else max(1, left // 2)
            length = min(share, request.num_tokens - request.launched_tokens)
            chunks.append(Chunk(request, request.launched_tokens, length))
            left -= length
        return chunks

    def _lone_length(self, request: R) -> int:
        """Return the most tokens that a prompt may take for itself."""
        start = request.launched_tokens
        num_left = request.num_tokens - start
        if num_left <= self._token_budget or self._lone_budget == self._token_budget:
            return self._token_budget
        # Two steps either way: the first in the size that keeps the GPU busiest.
        budget = self._lone_budget if num_left > 2 * self._token_budget else self._token_budget
        # At least half of the budget stays for the last chunk.
        most = num_left - max(1, self._token_budget // 2)
        length = min(budget, most)
        num_behind = (start + length) % WHOLE
        return length - num_behind if num_behind < length else length

    def remove(self, request: R) -> None:
        """Forget a request that is computed, cancelled or failed; unknown ones are ignored."""
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
