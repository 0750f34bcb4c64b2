"""Captured prompts on a GPU are plain ones: logits up to rounding, and every block of the pool."""

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
from shared.engine.workspace import prefill_workspace_bytes
from shared.kv.layout import KVLayout
from shared.model.llama import Llama
from shared.model.random_model import find_shape, random_tensors
from shared.ops.sampling import SamplingParams
from tests.gpu.model_checks import FAMILIES, TOLERANCE, relative_error, tiny_model

pytestmark = pytest.mark.gpu

BLOCK_SIZE, NUM_BLOCKS, TOKEN_BUDGET = 16, 200, 1_024
GREEDY = SamplingParams()
NUM_TOP = 20


def layout_of(model: Llama, dtype: str) -> KVLayout:
    return KVLayout(
        num_blocks=NUM_BLOCKS,
        num_layers=model.spec.num_layers,
        num_kv_heads=model.spec.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=model.spec.head_dim,
        dtype=dtype,  # type: ignore[arg-type]
    )


class Engine:
    """A pool full of NaN, and one way to compute into it."""

    def __init__(self, model: Llama, dtype: str, *, with_graphs: bool) -> None:
        layout = layout_of(model, dtype)
        self.kv = torch.full(layout.shape, float("nan"), dtype=model.dtype, device=model.device)
        stream = DeviceStream(model.device)
        graphs = (
            PrefillGraphs(model, self.kv, layout, stream, token_budget=TOKEN_BUDGET)
            if with_graphs
            else None
        )
        self.prefiller = StreamPrefiller(
            ModelRunner(model, self.kv, layout), stream, lambda _: 0, graphs=graphs
        )
        torch.cuda.synchronize()

    def step(self, *steps: SequenceStep) -> tuple[int | None, ...]:
        self.prefiller.launch(steps)
        return self.prefiller.collect().token_ids


def chunk(
    seed: int, start: int, stop: int, *, first_block: int, how: SamplingParams | None = GREEDY
) -> SequenceStep:
    """Return tokens `start` to `stop` of the prompt of that seed."""
    generator = torch.Generator().manual_seed(seed)
    return SequenceStep(
        token_ids=torch.randint(97, (1_100,), generator=generator)[start:stop].tolist(),
        start_position=start,
        block_table=list(range(first_block, first_block + 70)),
        sampling=how,
    )


STORY = (
    (chunk(1, 0, 7, first_block=1),),
    (chunk(2, 0, 512, first_block=1, how=None), chunk(3, 0, 1, first_block=75)),
    (chunk(2, 512, 600, first_block=1), chunk(4, 0, 100, first_block=80)),
    (chunk(4, 100, 1_100, first_block=80),),
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@torch.inference_mode()
def test_captured_steps_bring_what_plain_ones_bring(dtype: str, family: str) -> None:
    """Alone, mixed, chunks behind chunks.  Of other kernels the sums are rounded otherwise."""
    model = tiny_model(getattr(torch, dtype), "cuda", None, family)
    plain, captured = (Engine(model, dtype, with_graphs=flag) for flag in (False, True))
    for steps in STORY:
        told = []
        for engine in (plain, captured):
            histories = [TokenHistory(GREEDY, num_logprobs=NUM_TOP) for _ in steps]
            engine.step(
                *(
                    dataclasses.replace(step, history=history if step.sampling else None)
                    for step, history in zip(steps, histories, strict=True)
                )
            )
            told.append([dict(each.logprobs[0].top) for each in histories if each.logprobs])
        for ours, theirs in zip(*told, strict=True):
            shared = ours.keys() & theirs.keys()
            assert len(shared) > NUM_TOP // 2
            error = relative_error(
                torch.tensor([ours[i] for i in shared]), torch.tensor([theirs[i] for i in shared])
            )
            assert error < TOLERANCE[model.dtype]
    assert torch.equal(plain.kv.isnan(), captured.kv.isnan())
    error = relative_error(captured.kv.nan_to_num(), plain.kv.nan_to_num())
    assert error < TOLERANCE[model.dtype]


@torch.inference_mode()
def test_a_captured_step_gives_the_same_bits_every_time() -> None:
    """Behind other steps as behind none, and with steps of other sizes in flight."""
    model = tiny_model(torch.bfloat16, "cuda", None)
    engine = Engine(model, "bfloat16", with_graphs=True)
    first = engine.step(*STORY[0])
    blocks = engine.kv[1:2].clone()
    for _ in range(50):
        for steps in (STORY[1], STORY[0], STORY[2], STORY[0]):
            if engine.prefiller.num_in_flight == 2:
                engine.prefiller.collect()
            engine.prefiller.launch(steps)
        engine.prefiller.collect()
        assert engine.prefiller.collect().token_ids == first
        assert torch.equal(engine.kv[1:2, ..., :7, :], blocks[..., :7, :])


@torch.inference_mode()
def test_what_capturing_takes_was_set_aside() -> None:
    """A pool that fills the rest of the GPU must leave it."""
    spec = find_shape("random:smollm2-135m")
    model = Llama(spec, random_tensors(spec, dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    engine = Engine(model, "bfloat16", with_graphs=True)
    engine.step(chunk(1, 0, 1_000, first_block=1))
    after, _ = torch.cuda.mem_get_info()
    pool_bytes = engine.kv.numel() * engine.kv.element_size()
    allowed = prefill_workspace_bytes(spec, layout_of(model, "bfloat16"), token_budget=TOKEN_BUDGET)
    assert before - after - pool_bytes < allowed
