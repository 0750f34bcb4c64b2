"""The one thread of a daemon that computes, and its door to the event loop.

Torch's thread count and its inference mode belong to a thread, not to the process, so both are set
inside the thread that computes.  One thread also means one order: steps run as they were
submitted, and no two ever touch the pool at once.

It is a border as well: that the GPU is lost, or its memory full, has one name, whatever library a
call fails in.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from shared.kv.cuda_foreign import naming

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_NAME_BYTES = 15
"""Of a thread's name in the kernel, which refuses longer ones."""

TIMER_SLACK_NS = 1000
"""How late the kernel may wake the engine thread out of a sleep; 50,000 is what it starts with."""

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """A thread that runs what an event loop hands it, in order.

    Args:
        num_threads: How many threads torch uses for one operation.  Two processes that together
            use more than the machine has cores slow each other down many times over.
        name: The thread's name, as a debugger shows it.

    Raises:
        ValueError: `num_threads` is below 1.
    """

    def __init__(self, *, num_threads: int, name: str = "engine") -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads
        self.num_submitted = 0
        """Calls handed in since the start."""
        self.num_finished = 0
        """Calls that returned, raised or were dropped.  A watchdog that sees it stand still while
        `is_busy` knows that the engine is stuck."""
        self.is_stopped = False
        """It takes no calls any more."""
        self._count_lock = threading.Lock()
        self._thread_id: int | None = None
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=name,
            initializer=self._begin,
        )

    @property
    def is_busy(self) -> bool:
        """Whether a call is running or waiting."""
        return self.num_submitted != self.num_finished

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` on the engine thread and return what it returns.

        A call that has begun cannot be taken back: when the awaiting task is cancelled, it ends
        all the same, its result dropped.  One that has not begun is dropped.

        Raises:
            RuntimeError: The thread was stopped.
            GpuFatalError: A library failed with a status after which every call fails.
            GpuMemoryError: The GPU's memory is full; it says who holds it.
            CudaCallError: A call to CUDA failed, whoever made it.
            BaseException: Whatever else `function` raises.
        """
        return await asyncio.wrap_future(self._submit(partial(function, *args, **kwargs)))

    def probe(self) -> None:
        """Hand in a call that does nothing, unless another is under way.

        A thread that is well ends one or the other, and `num_finished` moves; a thread that was
        stopped takes nothing.
        """
        if not self.is_busy:
            with suppress(RuntimeError):
                self._submit(_do_nothing)

    def stack(self) -> str:
        """Return where the thread is now, as a traceback without any values."""
        frame = sys._current_frames().get(self._thread_id or 0)  # noqa: SLF001  documented as public
        return "" if frame is None else "".join(traceback.format_stack(frame))

    async def stop(self, *, grace_s: float | None = None) -> None:
        """End the thread: the running call ends first, waiting ones are dropped.  Idempotent.

        Args:
            grace_s: How long to wait for the running call; None waits for its end.  What takes
                longer (a model that is being loaded) goes on without anybody waiting for it.
        """
        self.is_stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        ended = asyncio.ensure_future(asyncio.to_thread(self._executor.shutdown))
        await asyncio.wait({ended}, timeout=grace_s)

    def _begin(self) -> None:
        self._thread_id = threading.get_ident()
        name = threading.current_thread().name[:MAX_NAME_BYTES]
        with suppress(OSError):  # for `top -H` and debuggers, which know nothing of Python's names
            Path("/proc/thread-self/comm").write_text(name, encoding="ascii", errors="replace")
        with suppress(OSError):  # what polls a GPU sleeps for as long as it says, not 50 us more
            slack = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
            slack.write_text(str(TIMER_SLACK_NS), encoding="ascii")
        torch.set_num_threads(self.num_threads)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        future = self._executor.submit(_infer, call)
        self.num_submitted += 1
        future.add_done_callback(self._count_finished)
        return future

    def _count_finished(self, _: object) -> None:
        # The engine thread ends calls while the loop's thread drops others.
        with self._count_lock:
            self.num_finished += 1


def _do_nothing() -> None:
    """What `probe` hands in."""


def _infer(call: Callable[[], T]) -> T:
    with naming("the engine"), torch.inference_mode():
        return call()
