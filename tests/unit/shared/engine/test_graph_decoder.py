"""Decode steps ahead of the host, against one process that looks at every token; on the CPU."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from shared.engine.batch import SequenceStep
from shared.engine.decoding import DecodeStep
from shared.engine.graph_decoder import GraphDecoder, batch_sizes
from shared.engine.history import TokenHistory
from shared.engine.local import LocalEngine
from shared.engine.runner import ModelRunner
from shared.kv.layout import KVLayout
from shared.kv.pool import LocalPool
from shared.model.llama import Llama
from shared.ops.pool_pair import PoolPair
from shared.ops.sampling import SamplingParams
from shared.ops.token_bitmap import pack_tokens
from tests.support.tiny_llama import random_tensors, tiny_spec

if TYPE_CHECKING:
    from collections.abc import Sequence

GREEDY = SamplingParams()
LAYOUT = KVLayout(
    num_blocks=30, num_layers=3, num_kv_heads=2, block_size=4, head_dim=8, dtype="float32"
)
MAX_TOKENS = 9


class Story:
    """Prompts that were prefilled, and what one process alone answers to them."""

    def __init__(self) -> None:
        spec = tiny_spec()
        self.model = Llama(spec, random_tensors(spec))
        self.pool = LocalPool(LAYOUT, fill=float("nan"))
        self.runner = ModelRunner(self.model, self.pool.kv, LAYOUT)
        self.decoder = GraphDecoder(
            self.model, PoolPair.of(self.pool.kv), LAYOUT, max_batch=3, max_context_len=24
        )
        self.prompts: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}

    def prefill(self, key: str, prompt: list[int], blocks: list[int]) -> None:
        step = SequenceStep(token_ids=prompt, start_position=0, block_table=blocks, sampling=GREEDY)
        (first,) = self.runner.execute([step]).token_ids
        assert first is not None
        self.prompts[key], self.tables[key], self.answers[key] = prompt, blocks, [first]

    def step(self, key: str, *, ahead: int = 0) -> DecodeStep:
        """Return the step behind `ahead` steps whose tokens are not known."""
        answer = self.answers[key]
        return DecodeStep(
            key=key,
            token_id=None if ahead else answer[-1],
            position=len(self.prompts[key]) + len(answer) - 1 + ahead,
            block_table=self.tables[key],
            sampling=GREEDY,
        )

    def collect(self, keys: Sequence[str]) -> None:
        for key, token_id in zip(keys, self.decoder.collect().token_ids, strict=True):
            self.answers[key].append(token_id)

    def expected(self, key: str, num_tokens: int) -> list[int]:
        engine = LocalEngine(self.model, num_blocks=12, block_size=4)
        (answer,) = engine.generate([self.prompts[key]], max_tokens=num_tokens, ignore_eos=True)
        return answer


@pytest.fixture
def story() -> Story:
    made = Story()
    made.prefill("a", [5, 6, 7, 8, 9, 10], [3, 1, 8, 12])
    made.prefill("b", [20, 21, 22], [2, 9, 14])
    made.prefill("c", [40, 41, 42, 43, 44], [4, 20, 21, 22])
    return made


@torch.inference_mode()
def test_tokens_that_the_host_never_saw_lead_to_the_same_answers(story: Story) -> None:
    """Every step but the first is launched before the one before it is looked at."""
    keys = ["a", "b"]
    story.decoder.launch([story.step(key) for key in keys])
    for _ in range(6):
        story.decoder.launch([story.step(key, ahead=1) for key in keys])
        assert story.decoder.num_in_flight == 2
        story.collect(keys)
    story.collect(keys)
    for key in keys:
        assert story.answers[key] == story.expected(key, 8)


@torch.inference_mode()
def test_a_table_may_grow_and_its_blocks_may_move(story: Story) -> None:
    """A block is added when it is needed; who made room comes back into other blocks."""
    story.tables["a"] = [3, 1]
    for table in ([3, 1], [3, 1], [3, 1, 8], [3, 1, 8], [3, 5, 8], [5, 3, 8], [5, 3, 8, 2]):
        if table != story.tables["a"]:
            moved = [(old, new) for old, new in zip(story.tables["a"], table, strict=False)]
            contents = story.pool.kv[[old for old, _ in moved]].clone()
            story.pool.kv[[new for _, new in moved]] = contents
            story.tables["a"] = table
        story.decoder.launch([story.step("a")])
        story.collect(["a"])
    assert story.answers["a"] == story.expected("a", 8)


@torch.inference_mode()
def test_a_batch_changes_while_steps_are_in_flight(story: Story) -> None:
    """`a` leaves, `c` joins in its row, `b` moves: each goes on with its own token."""
    story.decoder.launch([story.step("a"), story.step("b")])
    story.decoder.launch([story.step("b", ahead=1), story.step("c")])
    story.collect(["a", "b"])
    story.decoder.launch([story.step("c", ahead=1)])
    story.collect(["b", "c"])
    story.decoder.launch([story.step("c", ahead=1), story.step("b")])
    story.collect(["c"])
    story.collect(["c", "b"])
    assert story.answers["a"] == story.expected("a", 2)
    assert story.answers["b"] == story.expected("b", 4)
    assert story.answers["c"] == story.expected("c", 4)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_k=9, seed=4)])
@torch.inference_mode()
def test_a_prepared_step_is_the_step_that_its_token_makes_it(
    story: Story, sampling: SamplingParams
) -> None:
    """The sequence's later steps find its row and its table where the first one left them."""
    step, later = (
        dataclasses.replace(story.step("a", ahead=ahead), sampling=sampling) for ahead in (0, 1)
    )
    story.decoder.launch([step])
    story.decoder.launch([later])
    expected = story.decoder.collect(), story.decoder.collect()
    story.decoder.launch([story.step("b")])
    story.collect(["b"])
    prepared = story.decoder.prepare(dataclasses.replace(step, token_id=None))
    prepared.rehearse()
    assert story.decoder.num_in_flight == 0
    assert prepared.launch(story.answers["a"][-1])
    story.decoder.launch([later])
    assert (story.decoder.collect(), story.decoder.collect()) == expected


@torch.inference_mode()
def test_a_prepared_step_gives_way_to_another_one(story: Story) -> None:
    prepared = story.decoder.prepare(story.step("a"))
    story.decoder.launch([story.step("b")])
    assert not prepared.launch(story.answers["a"][-1])
    with pytest.raises(ValueError, match="a step is in flight"):
        story.decoder.prepare(story.step("c"))
    story.collect(["b"])
    assert not prepared.launch(story.answers["a"][-1])
    story.decoder.launch([story.step("a"), story.step("b")])
    story.collect(["a", "b"])
    assert story.answers["a"] == story.expected("a", 2)
    assert story.answers["b"] == story.expected("b", 3)


@torch.inference_mode()
def test_a_table_that_was_replaced_is_read_anew(story: Story) -> None:
    """As when blocks of the peer were moved into the own pool."""
    story.decoder.launch([story.step("a")])
    story.collect(["a"])
    story.pool.kv[25:28] = story.pool.kv[[3, 1, 8]]
    story.pool.kv[[3, 1, 8]] = float("nan")
    story.tables["a"] = [25, 26, 27, 12]
    story.decoder.launch([story.step("a")])
    story.collect(["a"])
    assert story.answers["a"] == story.expected("a", 3)


@torch.inference_mode()
def test_no_more_than_two_steps_are_in_flight(story: Story) -> None:
    """The memory that a third would write is still being read."""
    story.decoder.launch([story.step("a")])
    story.decoder.launch([story.step("a", ahead=1)])
    with pytest.raises(ValueError, match="2 steps are in flight"):
        story.decoder.launch([story.step("a", ahead=2)])


def test_batch_sizes_end_at_the_largest() -> None:
    assert batch_sizes(1) == (1,)
    assert batch_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert batch_sizes(300)[-3:] == (256, 288, 300)


# --- choices other than the likeliest token ---------------------------------------------------

WISHES = {
    "a": SamplingParams(temperature=2.0, top_k=20, repetition_penalty=1.5, seed=3),
    "b": GREEDY,
    "c": SamplingParams(frequency_penalty=5.0, min_tokens=20, end_ids=(2,)),
}


@torch.inference_mode()
def test_what_a_host_never_saw_is_penalised_all_the_same(story: Story) -> None:
    """A step is launched before the token of the one before is known, and counts it."""
    histories: dict[str, TokenHistory | None] = {}
    for key, how in WISHES.items():
        prompt = pack_tokens(story.prompts[key], story.model.spec.vocab_size)
        first = [story.answers[key][0]]
        histories[key] = TokenHistory.needed_for(how, prompt=prompt, answer_ids=first)
        assert (histories[key] is None) is (how is GREEDY)

    def step(key: str, ahead: int) -> DecodeStep:
        plain = story.step(key, ahead=ahead)
        return dataclasses.replace(plain, sampling=WISHES[key], history=histories[key])

    story.decoder.launch([step(key, 0) for key in WISHES])
    for _ in range(5):
        story.decoder.launch([step(key, 1) for key in WISHES])
        story.collect(list(WISHES))
    story.collect(list(WISHES))
    for key, how in WISHES.items():
        assert story.answers[key] == eager_answer(story, key, how)


def eager_answer(story: Story, key: str, how: SamplingParams) -> list[int]:
    """Return seven tokens, each looked at before the next is asked for."""
    prompt, answer = story.prompts[key], story.answers[key][:1]
    bitmap = pack_tokens(prompt, story.model.spec.vocab_size)
    history = TokenHistory.needed_for(how, prompt=bitmap, answer_ids=answer)
    while len(answer) < 7:
        step = SequenceStep(
            token_ids=(answer[-1],),
            start_position=len(prompt) + len(answer) - 1,
            block_table=story.tables[key],
            sampling=how,
            history=history,
        )
        answer.extend(i for i in story.runner.execute([step]).token_ids if i is not None)
    return answer


@torch.inference_mode()
def test_probabilities_are_told_when_their_token_is(story: Story) -> None:
    """They are copied behind the step, so nobody waits for them before."""
    history = TokenHistory(GREEDY, num_logprobs=1)
    for ahead in (0, 1):
        step = dataclasses.replace(story.step("a", ahead=ahead), history=history)
        story.decoder.launch([step])
    assert not history.logprobs
    for number in (1, 2):
        story.collect(["a"])
        assert len(history.logprobs) == number
        ((likeliest, logprob),) = history.logprobs[-1].top
        assert (likeliest, logprob) == (story.answers["a"][-1], history.logprobs[-1].logprob)
