"""Prefill steps ahead of the host, against steps that are looked at one by one; on the CPU."""

from __future__ import annotations

import dataclasses

import torch

from shared.engine.batch import SequenceStep
from shared.engine.device_stream import DeviceStream
from shared.engine.history import TokenHistory
from shared.engine.prefilling import EagerPrefiller
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.kv.layout import KVLayout
from shared.kv.pool import LocalPool
from shared.model.llama import Llama
from shared.ops.sampling import SamplingParams
from tests.support.timed_stream import BACK_MS, WORK_MS, TimedStream
from tests.support.tiny_llama import random_tensors, tiny_spec

GREEDY = SamplingParams()
LAYOUT = KVLayout(
    num_blocks=20, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32"
)
PROMPT = [5, 6, 7, 8, 9, 10, 11]


def runner() -> ModelRunner:
    spec = tiny_spec()
    pool = LocalPool(LAYOUT, fill=float("nan"))
    return ModelRunner(Llama(spec, random_tensors(spec)), pool.kv, LAYOUT)


def chunk(start: int, stop: int, *, blocks: list[int]) -> SequenceStep:
    return SequenceStep(
        token_ids=PROMPT[start:stop],
        start_position=start,
        block_table=blocks,
        sampling=GREEDY if stop == len(PROMPT) else None,
    )


@torch.inference_mode()
def test_two_chunks_in_flight_bring_what_a_whole_prompt_brings() -> None:
    """Each launch tells the event that its blocks are behind, the last records first."""
    (expected,) = runner().execute([chunk(0, 7, blocks=[3, 1])]).token_ids
    recorded: list[int] = []

    def record(handle: int) -> int:
        recorded.append(handle)
        return len(recorded) - 1

    stream = DeviceStream(torch.device("cpu"))
    prefiller = StreamPrefiller(runner(), stream, record)
    assert prefiller.launch([chunk(0, 4, blocks=[9, 2])]) == 0
    assert prefiller.launch([chunk(4, 7, blocks=[9, 2]), chunk(0, 4, blocks=[5])]) == 1
    assert (prefiller.num_in_flight, prefiller.is_done()) == (2, True)
    assert prefiller.collect().token_ids == (None,)
    assert prefiller.collect().token_ids == (expected, None)
    assert recorded == [stream.handle] * 2
    assert not prefiller.is_done()


@torch.inference_mode()
def test_an_eager_step_is_done_when_it_is_launched() -> None:
    (expected,) = runner().execute([chunk(0, 7, blocks=[3, 1])]).token_ids
    prefiller = EagerPrefiller(runner())
    assert (prefiller.num_in_flight, prefiller.is_done()) == (0, False)
    assert prefiller.launch([chunk(0, 7, blocks=[3, 1])]) is None
    assert (prefiller.num_in_flight, prefiller.is_done()) == (1, True)
    assert prefiller.collect().token_ids == (expected,)
    assert prefiller.num_in_flight == 0


@torch.inference_mode()
def test_a_first_token_s_probability_is_told_with_it() -> None:
    """The same in both: it is on its way while the step runs."""
    told = []
    for make in (
        lambda: EagerPrefiller(runner()),
        lambda: StreamPrefiller(runner(), DeviceStream(torch.device("cpu")), lambda _: 0),
    ):
        prefiller, history = make(), TokenHistory(GREEDY, num_logprobs=2)
        prefiller.launch([dataclasses.replace(chunk(0, 7, blocks=[3, 1]), history=history)])
        (token_id,) = prefiller.collect().token_ids
        (likely,) = history.logprobs
        assert likely.top[0] == (token_id, likely.logprob)
        told.append(likely)
    assert told[0] == told[1]


@torch.inference_mode()
def test_a_step_tells_what_it_took_the_device_and_when_its_blocks_were_written() -> None:
    """Decoded may pull from then on, while the token is still computed and read back."""
    stream = TimedStream()
    prefiller = StreamPrefiller(runner(), stream, lambda _: 0)
    prefiller.launch([chunk(0, 4, blocks=[9, 2])])
    prefiller.launch([chunk(4, 7, blocks=[9, 2])])
    assert not prefiller.is_done()
    stream.fake.run()
    assert prefiller.is_done()
    for _ in range(2):
        step = prefiller.collect()
        assert (step.device_ns, step.written_ns) == ((WORK_MS + BACK_MS) * 1e6, WORK_MS * 1e6)


@torch.inference_mode()
def test_a_step_on_a_cpu_has_no_device_s_time() -> None:
    for prefiller in (
        EagerPrefiller(runner()),
        StreamPrefiller(runner(), DeviceStream(torch.device("cpu")), lambda _: 0),
    ):
        prefiller.launch([chunk(0, 7, blocks=[3, 1])])
        step = prefiller.collect()
        assert (step.device_ns, step.written_ns) == (None, None)
