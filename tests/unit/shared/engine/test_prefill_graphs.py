"""Short steps of fixed size against steps of their own size; on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shared.engine.batch import SequenceStep
from shared.engine.device_stream import DeviceStream
from shared.engine.history import TokenHistory
from shared.engine.prefill_graphs import PrefillGraphs
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.kv.layout import KVLayout
from shared.kv.pool import LocalPool
from shared.model.llama import Llama
from shared.ops.sampling import SamplingParams
from tests.support.tiny_llama import random_tensors, tiny_spec

GREEDY = SamplingParams()
LAYOUT = KVLayout(
    num_blocks=90, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32"
)
TOKEN_BUDGET = 200


class Engine:
    """A pool, and both ways to compute into it."""

    def __init__(self, *, with_graphs: bool, window: int | None = None) -> None:
        spec = dataclasses.replace(tiny_spec(), sliding_window=window)
        model = Llama(spec, random_tensors(spec))
        self.pool = LocalPool(LAYOUT, fill=float("nan"))
        self.stream = DeviceStream(model.device)
        self.runner = ModelRunner(model, self.pool.kv, LAYOUT)
        self.graphs = PrefillGraphs(
            model, self.pool.kv, LAYOUT, self.stream, token_budget=TOKEN_BUDGET
        )
        self.events = 0
        self.prefiller = StreamPrefiller(
            self.runner, self.stream, self._record, graphs=self.graphs if with_graphs else None
        )

    def _record(self, _: int) -> int:
        self.events += 1
        return self.events

    def step(self, *steps: SequenceStep) -> tuple[int | None, ...]:
        self.prefiller.launch(steps)
        return self.prefiller.collect().token_ids


def chunk(
    seed: int, start: int, stop: int, *, blocks: list[int], how: SamplingParams | None = GREEDY
) -> SequenceStep:
    """Return tokens `start` to `stop` of the prompt of that seed."""
    generator = torch.Generator().manual_seed(seed)
    return SequenceStep(
        token_ids=torch.randint(97, (300,), generator=generator)[start:stop].tolist(),
        start_position=start,
        block_table=blocks,
        sampling=how,
    )


STORY = (
    (chunk(1, 0, 7, blocks=[3, 1]),),
    (chunk(2, 0, 16, blocks=[9, 4, 8, 5], how=None), chunk(3, 0, 1, blocks=[20])),
    (chunk(2, 16, 17, blocks=[9, 4, 8, 5, 2]), chunk(4, 0, 100, blocks=[*range(30, 55)])),
    (chunk(4, 100, 130, blocks=[*range(30, 63)]),),
)
"""Alone, several in one step, chunks behind chunks, more than a tile."""


@pytest.mark.parametrize("window", [None, 11])
@torch.inference_mode()
def test_padded_steps_bring_what_plain_ones_bring(window: int | None) -> None:
    """Tokens, and every block of the pool; what is not a request's stays as it was."""
    plain, padded = (Engine(with_graphs=flag, window=window) for flag in (False, True))
    for steps in STORY:
        assert padded.graphs.takes(steps)
        assert padded.step(*steps) == plain.step(*steps)
    assert padded.events == len(STORY)
    torch.testing.assert_close(padded.pool.kv, plain.pool.kv, equal_nan=True)


@torch.inference_mode()
def test_a_step_that_is_not_short_is_the_runner_s() -> None:
    """The same stream and the same pool, so they may follow each other in any order."""
    plain, padded = (Engine(with_graphs=flag) for flag in (False, True))
    long = chunk(5, 0, 290, blocks=[*range(10, 83)])
    assert not padded.graphs.takes([long])
    for steps in (STORY[0], (long,), STORY[0]):
        assert padded.step(*steps) == plain.step(*steps)


@torch.inference_mode()
def test_the_event_stands_between_the_blocks_and_the_token() -> None:
    """Blocks are pulled while the first token is still being computed."""
    engine = Engine(with_graphs=True)
    written: list[bool] = []

    def on_written() -> None:
        whole = engine.pool.kv[[3, 1]].transpose(3, 4)
        written.append(not whole[:1].isnan().any() and not whole[1, :, :, :3].isnan().any())
        written.append(bool(engine.graphs._head.sampled.any()))

    engine.graphs.begin(STORY[0], on_written)
    assert written == [True, False]


@torch.inference_mode()
def test_other_choices_come_from_the_same_logits() -> None:
    """One plain row, one drawn, one that tells how likely its token was."""
    sampled, told = [], []
    for engine in (Engine(with_graphs=False), Engine(with_graphs=True)):
        history = TokenHistory(GREEDY, num_logprobs=2)
        how = SamplingParams(temperature=3.0, top_k=30, seed=5)
        steps = (
            chunk(1, 0, 7, blocks=[3, 1]),
            chunk(2, 0, 9, blocks=[9, 4, 8], how=how),
            dataclasses.replace(chunk(3, 0, 5, blocks=[11, 12]), history=history),
        )
        sampled.append(engine.step(*steps))
        told.append(history.logprobs)
    assert sampled[0] == sampled[1]
    assert told[0][0].top[0][0] == told[1][0].top[0][0] == sampled[0][2]
    assert told[0][0].logprob == pytest.approx(told[1][0].logprob)


@torch.inference_mode()
def test_a_step_that_would_write_elsewhere_is_refused() -> None:
    """Before anything is enqueued."""
    engine = Engine(with_graphs=True)
    for blocks, says in (([0, 1], "block outside 1 to 89"), ([3], "has 1 blocks")):
        with pytest.raises(ValueError, match=says):
            engine.prefiller.launch([chunk(1, 0, 7, blocks=blocks)])
    assert engine.pool.kv.isnan().all()
    assert (engine.events, engine.prefiller.num_in_flight) == (0, 0)
