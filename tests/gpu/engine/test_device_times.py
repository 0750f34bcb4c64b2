"""What the GPU's clock says of steps and copies: never nothing, never more than the host waited."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from shared.engine.batch import SequenceStep
from shared.engine.block_puller import CudaPuller
from shared.engine.decoding import DecodeStep
from shared.engine.device_stream import DeviceStream
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.run_copies import RunCopies
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.ops.pool_pair import PoolPair
from shared.ops.sampling import SamplingParams
from tests.gpu.model_checks import pool_of, prompt, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.block_puller import BlockPuller

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

GREEDY = SamplingParams()
DEADLINE_S = 30.0

SLACK = 1.02
"""How much faster the GPU's clock may run than the host's."""

SLACK_NS = 20_000
"""Beside that: an event's stamp is good to a microsecond, and so is the host's reading of it."""

FEW, MANY = 4, 4000
"""Blocks of 128 KiB: MANY are half a gigabyte, which no GPU copies in the time of a launch."""


def check(device_ns: int | None, *, within_ns: int) -> int:
    """Check a time against the host's clock around it; return it."""
    assert device_ns is not None
    assert 0 < device_ns <= within_ns * SLACK + SLACK_NS
    return device_ns


def timed(stream: DeviceStream, work: Callable[[], None]) -> int:
    """Return what work took the device, checked against the host's clock."""
    torch.cuda.synchronize()
    began_ns = time.monotonic_ns()
    with stream.current():
        timing = stream.begin_timing()
        work()
        timing.end()
    timing.wait()
    assert timing.is_passed()
    return check(timing.device_ns(), within_ns=time.monotonic_ns() - began_ns)


def test_more_work_takes_longer_by_the_gpu_s_clock() -> None:
    """Eight times as long a spin, as seen from a stream that had nothing else to do."""
    stream = DeviceStream(torch.device("cuda"))
    timed(stream, partial(torch.cuda._sleep, 1_000))  # the kernel itself is loaded
    short_ns, long_ns = (
        min(timed(stream, partial(torch.cuda._sleep, cycles)) for _ in range(5))
        for cycles in (2_000_000, 16_000_000)
    )
    assert long_ns > 4 * short_ns


def test_work_behind_other_work_is_timed_alone() -> None:
    """A step that was launched ahead took its own time, and not what it waited for."""
    stream = DeviceStream(torch.device("cuda"))
    torch.cuda.synchronize()
    timings = []
    with stream.current():
        for cycles in (16_000_000, 2_000_000):
            timings.append(stream.begin_timing())
            torch.cuda._sleep(cycles)
            timings[-1].end()
    timings[-1].wait()
    first_ns, second_ns = (timing.device_ns() for timing in timings)
    assert first_ns is not None
    assert second_ns is not None
    assert first_ns > 4 * second_ns > 0


def pull_ns(puller: BlockPuller, source: Tensor, num_blocks: int, *, is_busy: bool) -> int:
    """Return the least of what some pulls took the device, each checked against the host."""
    ids = list(range(1, 1 + num_blocks))
    readings_ns = []
    for _ in range(5):
        copy = puller.prepare(source, ids, ids)
        torch.cuda.synchronize()
        began_ns = time.monotonic_ns()
        copy.start(is_busy=is_busy)
        while not copy.is_done():
            assert time.monotonic_ns() - began_ns < DEADLINE_S * 1e9
        readings_ns.append(check(copy.device_ns(), within_ns=time.monotonic_ns() - began_ns))
    return min(readings_ns)


@pytest.mark.parametrize("is_busy", [False, True], ids=["kernel", "copy engine"])
def test_a_longer_pull_takes_longer(is_busy: bool) -> None:
    shape = (1 + MANY, 4, 2, 4, 16, 128)
    source, target = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    puller = CudaPuller(target)
    few_ns = pull_ns(puller, source, FEW, is_busy=is_busy)
    assert pull_ns(puller, source, MANY, is_busy=is_busy) > 2 * few_ns


def test_a_copy_to_the_host_is_timed_as_well() -> None:
    shape = (1 + MANY // 4, 4, 2, 4, 16, 128)
    source = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    target = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=True)
    copies = RunCopies(target, source.device)
    few_ns = pull_ns(copies, source, FEW, is_busy=False)
    assert pull_ns(copies, source, MANY // 4, is_busy=False) > 2 * few_ns


@torch.inference_mode()
def test_decode_steps_are_timed_whether_launched_ahead_or_made_ready() -> None:
    """Steps of one stream run one after the other, so together they take no more than the host."""
    model = tiny_model(torch.float16, "cuda", None)
    layout, kv = pool_of(model)
    decoder = GraphDecoder(model, PoolPair.of(kv), layout, max_batch=2, max_context_len=24)

    def step(position: int, token_id: int | None) -> DecodeStep:
        return DecodeStep(
            key="a",
            token_id=token_id,
            position=position,
            block_table=[3, 4, 5],
            sampling=GREEDY,
        )

    for launch in (
        lambda: decoder.launch([step(0, 5)]),
        lambda: decoder.prepare(step(0, None)).launch(5),
    ):
        torch.cuda.synchronize()
        began_ns = time.monotonic_ns()
        launch()
        decoder.launch([step(1, None)])
        took_ns = [decoder.collect().device_ns for _ in range(2)]
        within_ns = time.monotonic_ns() - began_ns
        check(sum(check(each, within_ns=within_ns) for each in took_ns), within_ns=within_ns)


@torch.inference_mode()
def test_a_prompt_s_blocks_are_written_before_its_step_is_over() -> None:
    model = tiny_model(torch.float16, "cuda", None)
    layout, kv = pool_of(model)
    prefiller = StreamPrefiller(
        ModelRunner(model, kv, layout), DeviceStream(model.device), lambda _: 0
    )
    for num_tokens in (3, 20):
        step = SequenceStep(
            token_ids=prompt(num_tokens, 1),
            start_position=0,
            block_table=_blocks(num_tokens, layout.block_size),
            sampling=GREEDY,
        )
        torch.cuda.synchronize()
        began_ns = time.monotonic_ns()
        prefiller.launch([step])
        collected = prefiller.collect()
        device_ns = check(collected.device_ns, within_ns=time.monotonic_ns() - began_ns)
        assert collected.written_ns is not None
        assert 0 < collected.written_ns <= device_ns


def _blocks(num_tokens: int, block_size: int) -> Sequence[int]:
    return list(range(1, 1 + -(-num_tokens // block_size)))
