"""One step: chunks and decodes mixed, results in the right places."""

from __future__ import annotations

import pytest
import torch

from shared.engine.batch import SequenceStep
from shared.engine.runner import ModelRunner
from shared.kv.layout import KVLayout
from shared.kv.pool import LocalPool
from shared.model.llama import Llama
from shared.ops.sampling import SamplingParams
from tests.support.tiny_llama import random_tensors, tiny_spec

GREEDY = SamplingParams()
LAYOUT = KVLayout(
    num_blocks=20, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32"
)


@pytest.fixture
def runner() -> ModelRunner:
    """A runner over a pool of NaN."""
    spec = tiny_spec()
    pool = LocalPool(LAYOUT, fill=float("nan"))
    return ModelRunner(Llama(spec, random_tensors(spec)), pool.kv, LAYOUT)


def step(
    token_ids: list[int], start: int, blocks: list[int], sampling: SamplingParams | None
) -> SequenceStep:
    return SequenceStep(
        token_ids=token_ids, start_position=start, block_table=blocks, sampling=sampling
    )


def test_each_sequence_that_wants_a_token_gets_its_own(runner: ModelRunner) -> None:
    """In one step: a chunk without a token, a whole prompt and, afterwards, both decoding."""
    prompt_a, prompt_b = [5, 6, 7, 8, 9, 10], [20, 21, 22]
    blocks_a, blocks_b = [3, 1, 8], [2, 9]
    alone_a = runner.execute([step(prompt_a, 0, [11, 12], GREEDY)]).token_ids
    alone_b = runner.execute([step(prompt_b, 0, [13], GREEDY)]).token_ids

    mixed = runner.execute(
        [step(prompt_a[:4], 0, blocks_a, None), step(prompt_b, 0, blocks_b, GREEDY)]
    )
    assert mixed.token_ids == (None, *alone_b)
    assert mixed.logits is None
    (token_b,) = alone_b
    assert token_b is not None
    then = runner.execute(
        [step([token_b], 3, blocks_b, GREEDY), step(prompt_a[4:], 4, blocks_a, GREEDY)],
        with_logits=True,
    )
    assert then.token_ids[1:] == alone_a
    assert then.logits is not None
    assert then.logits.shape == (3, 97)
    assert then.token_ids[0] == int(then.logits[0].argmax())


def test_the_noise_is_that_of_the_sampled_tokens_position(runner: ModelRunner) -> None:
    """Chunked or not, the token behind six others is drawn with position 6."""
    hot = SamplingParams(temperature=50.0, seed=3)
    prompt = [5, 6, 7, 8, 9, 10]
    whole = runner.execute([step(prompt, 0, [1, 2], hot)]).token_ids
    runner.execute([step(prompt[:3], 0, [3, 4], None)])
    in_chunks = runner.execute([step(prompt[3:], 3, [3, 4], hot)]).token_ids
    assert whole == in_chunks
    others = {
        runner.execute([step(prompt[: 6 - n], 0, [5, 6], hot)]).token_ids for n in range(1, 4)
    }
    assert len(others | {whole}) > 1


def test_a_refused_step_writes_nothing() -> None:
    """The second sequence is at fault, and the first one's blocks stay as they were."""
    spec = tiny_spec()
    pool = LocalPool(LAYOUT, fill=7.0)
    runner = ModelRunner(Llama(spec, random_tensors(spec)), pool.kv, LAYOUT)
    with pytest.raises(ValueError, match="outside 1 to 19"):
        runner.execute([step([1], 0, [1], GREEDY), step([1], 0, [20], GREEDY)])
    assert bool((pool.kv == 7.0).all())


def test_a_pool_of_another_shape_is_refused() -> None:
    """A pool of another model would be read as if it were this one's."""
    spec = tiny_spec()
    model = Llama(spec, random_tensors(spec))
    with pytest.raises(ValueError, match="the pool's shape is"):
        ModelRunner(model, torch.zeros(1), LAYOUT)
    kv = torch.zeros(LAYOUT.shape, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a pool of"):
        ModelRunner(model, kv, LAYOUT)
