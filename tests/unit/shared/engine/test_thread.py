"""The engine thread: order, settings, progress and a clean end."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch

from shared.engine.thread import EngineThread
from shared.kv.cuda_status import cuda_error
from shared.kv.errors import GpuFatalError, GpuMemoryError


def fail() -> None:
    raise ZeroDivisionError("as planned")


def test_calls_run_in_order_on_one_thread_with_its_own_settings() -> None:
    """Torch's thread count and inference mode belong to a thread, so they are set inside it."""
    here = torch.get_num_threads()

    def look() -> tuple[int, bool, str]:
        name = threading.current_thread().name
        return torch.get_num_threads(), torch.is_inference_mode_enabled(), name

    async def main() -> list[tuple[int, bool, str]]:
        engine = EngineThread(num_threads=here + 1, name="calc")
        try:
            return [await engine.run(look) for _ in range(2)]
        finally:
            await engine.stop()

    seen = asyncio.run(main())
    assert seen[0] == seen[1] == (here + 1, True, "calc_0")
    assert not torch.is_inference_mode_enabled()


def test_progress_is_counted_through_success_and_failure() -> None:
    """A watchdog reads the counters; an exception is progress and reaches the caller."""

    async def main() -> EngineThread:
        engine = EngineThread(num_threads=1)
        may_end = threading.Event()
        running = asyncio.create_task(engine.run(may_end.wait))
        await asyncio.sleep(0)
        assert engine.is_busy
        may_end.set()
        assert await running is True
        with pytest.raises(ZeroDivisionError, match="as planned"):
            await engine.run(fail)
        await engine.stop()
        return engine

    engine = asyncio.run(main())
    assert (engine.num_submitted, engine.num_finished, engine.is_busy) == (2, 2, False)


def test_a_lost_gpu_has_one_name_whatever_library_tells_of_it() -> None:
    """Torch, CuPy and our own calls fail alike, so that the daemon's last words say what it was."""

    class Foreign(RuntimeError):
        error_code = 700

    async def main() -> BaseException | None:
        engine = EngineThread(num_threads=1)

        def step() -> None:
            raise Foreign("CUDA error: see CUDA_LAUNCH_BLOCKING")

        try:
            with pytest.raises(GpuFatalError, match="700: a kernel used an illegal") as lost:
                await engine.run(step)
        finally:
            await engine.stop()
        return lost.value.__cause__

    assert type(asyncio.run(main())).__name__ == "Foreign"


def test_full_memory_has_its_name_too() -> None:
    """Whoever waits for the call may live on, and can say why it was not done."""

    async def main() -> None:
        engine = EngineThread(num_threads=1)

        def step() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

        try:
            await engine.run(step)
        finally:
            await engine.stop()

    with pytest.raises(GpuMemoryError, match="the engine failed with CUDA error 2: the GPU's mem"):
        asyncio.run(main())


@pytest.mark.parametrize("error", [cuda_error("aCall", 719), RuntimeError("a shape is wrong")])
def test_what_has_its_name_already_passes_as_it_is(error: RuntimeError) -> None:
    """A second wrapping would hide which call it was, and a fault of ours is no fault of a GPU."""

    async def main() -> None:
        engine = EngineThread(num_threads=1)

        def step() -> None:
            raise error

        try:
            await engine.run(step)
        finally:
            await engine.stop()

    with pytest.raises(type(error), match=str(error)) as raised:
        asyncio.run(main())
    assert raised.value is error


def test_stop_ends_the_running_call_and_drops_the_waiting_ones() -> None:
    """A step in flight must finish writing; one that has not begun must not begin."""
    ran: list[str] = []

    async def main() -> EngineThread:
        engine = EngineThread(num_threads=1)
        begun, may_end = threading.Event(), threading.Event()

        def first() -> None:
            begun.set()
            may_end.wait()
            ran.append("first")

        tasks = [
            asyncio.create_task(engine.run(first)),
            asyncio.create_task(engine.run(ran.append, "second")),
        ]
        await asyncio.to_thread(begun.wait)
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        may_end.set()
        await stopping
        await engine.stop()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[0] is None
        assert isinstance(results[1], asyncio.CancelledError)
        with pytest.raises(RuntimeError, match="after shutdown"):
            await engine.run(fail)
        return engine

    engine = asyncio.run(main())
    assert ran == ["first"]
    assert not engine.is_busy


def test_no_threads_is_refused() -> None:
    """Torch would raise only inside the thread, where nobody looks."""
    with pytest.raises(ValueError, match="num_threads is 0"):
        EngineThread(num_threads=0)


def test_stopping_waits_for_a_running_call_no_longer_than_it_is_told() -> None:
    """A daemon that is told to end while it loads a model must not look hung."""
    has_begun, may_end = threading.Event(), threading.Event()

    def load() -> None:
        has_begun.set()
        may_end.wait()

    async def scene() -> None:
        engine = EngineThread(num_threads=1)
        running = asyncio.ensure_future(engine.run(load))
        await asyncio.to_thread(has_begun.wait)
        await engine.stop(grace_s=0.01)
        assert engine.is_busy
        may_end.set()
        await running
        await engine.stop()
        assert not engine.is_busy

    asyncio.run(scene())


def test_a_probe_moves_the_count_of_an_idle_thread_and_waits_behind_a_busy_one() -> None:
    """One probe at a time: a watchdog that asks a stuck engine every second must not pile up."""

    async def main() -> None:
        engine = EngineThread(num_threads=1)
        engine.probe()
        await engine.run(int)
        assert engine.num_finished == 2
        may_end = threading.Event()
        running = asyncio.ensure_future(engine.run(may_end.wait))
        await asyncio.sleep(0)
        engine.probe()
        assert engine.num_submitted == 3
        may_end.set()
        await running
        await engine.stop()
        engine.probe()
        assert engine.num_submitted == 3

    asyncio.run(main())


def test_the_stack_tells_where_the_thread_is() -> None:
    """It goes into the log of a daemon that is about to be killed; values could be prompts."""

    async def main() -> None:
        engine = EngineThread(num_threads=1)
        assert engine.stack() == ""
        is_in, may_end = threading.Event(), threading.Event()

        def get_stuck(secret: str) -> str:
            is_in.set()
            may_end.wait()
            return secret

        running = asyncio.ensure_future(engine.run(get_stuck, "my prompt"))
        await asyncio.to_thread(is_in.wait)
        stack = engine.stack()
        may_end.set()
        await running
        await engine.stop()
        assert "in get_stuck" in stack
        assert "my prompt" not in stack

    asyncio.run(main())


def test_the_kernel_knows_the_threads_name() -> None:
    """`top -H` and debuggers show it, which know nothing of Python's names."""

    async def main() -> str:
        engine = EngineThread(num_threads=1, name="a-name-longer-than-fifteen-bytes")
        try:
            return await engine.run(lambda: Path("/proc/thread-self/comm").read_text())
        finally:
            await engine.stop()

    assert asyncio.run(main()) == "a-name-longer-t\n"
