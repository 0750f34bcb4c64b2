"""SmolLM2's greedy answers to 20 questions, and what a device's must have in common with a CPU's.

In float32, without TF32, they are equal by the margin rule (`margin_rule.py`).  In bfloat16 they
are not: each of some 240 roundings on a number's way through 30 layers, to 2^-9 at most and a
third of that on the average, adds to a relative error of about 2 %, and the norms make it about 4 %
of what tells one token from another (3.7 to 4.9 % on a CPU, where 1.4 % of the choices differ).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.client import Client
from shared.engine.local import LocalEngine
from shared.model.fetch import fetch_model
from shared.model.llama import Llama
from shared.model.loader import load_model, load_model_file
from tests.support.margin_rule import GreedyReference
from tests.support.pair import Pair
from tests.support.questions import first_questions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from torch import Tensor

    from shared.kv.layout import DTypeName

MODEL = "smollm2-135m-instruct"
NUM_QUESTIONS = 20
NUM_TOKENS = 64
NUM_BLOCKS = 512

MAX_BFLOAT16_ERROR = 0.08
"""Of ‖logits - exact‖ / ‖exact - its mean over the vocabulary‖ over a prompt and its answer: twice
what is usual, for other orders of addition."""

MAX_BFLOAT16_FLIPS = 0.05
"""Share of the tokens after which another one leads."""


def embedded_model() -> Path:
    """Return the model's file, fetched where it is not there yet.

    Raises:
        FetchError: It cannot be fetched; the message says where from, and `XDG_CACHE_HOME` where
            it would lie.
    """
    return fetch_model(MODEL, notify=print)


def exact_references() -> list[GreedyReference]:
    """Return one process's answers on the CPU, in float32; half a minute on two cores."""
    loaded = load_model_file(embedded_model(), "float32")
    source, questions = first_questions(NUM_QUESTIONS)
    print(f"questions: {source}", flush=True)
    assert loaded.chat_template is not None
    with closing(loaded.chat_template) as template:
        prompts = [
            loaded.tokenizer.encode(template.render([{"role": "user", "content": question}]))
            for question in questions
        ]
    engine = LocalEngine(Llama(loaded.spec, loaded.tensors), num_blocks=NUM_BLOCKS)
    answers = engine.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [
        GreedyReference.of_choices(
            prompt, answer, engine.prompt_logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
        )
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def engine_on(device: str, dtype: DTypeName) -> LocalEngine:
    """Return one process on a device; its pool is full of NaN at first."""
    loaded = load_model(MODEL, dtype, device)
    model = Llama(loaded.spec, loaded.tensors)
    return LocalEngine(model, num_blocks=NUM_BLOCKS, fill=float("nan"))


def check_one_process(engine: LocalEngine, references: Sequence[GreedyReference]) -> None:
    """Fail unless one process's answers are the references, all of them in one batch."""
    answers = engine.generate(
        [reference.prompt_ids for reference in references], max_tokens=NUM_TOKENS, ignore_eos=True
    )
    _check(answers, references, engine)


def check_pair(
    folder: Path,
    devices: tuple[str, str],
    access: str,
    references: Sequence[GreedyReference],
    engine: LocalEngine,
) -> None:
    """Fail unless a pair's answers are the references, one by one and all at once.

    Args:
        folder: An empty folder.
        devices: Prefilld's and decoded's.
        access: How decoded uses the blocks.
        references: What it must answer.
        engine: One process on the same kind of device: judges where a choice was close.
    """
    settings = {
        "prefilld.device": devices[0],
        "decoded.device": devices[1],
        "pool.access": access,
        "prefilld.token_budget": 48,  # most prompts are announced on the way
        "pool.num_blocks": NUM_BLOCKS,
        "decoded.num_blocks": NUM_BLOCKS,
        "decoded.max_batch": NUM_QUESTIONS,
    }
    with Pair(folder, model=MODEL, settings=settings, start_timeout_s=200) as pair:
        assert pair.status()["link"]["access"] == access

        def ask(reference: GreedyReference) -> tuple[int, ...]:
            client = Client(pair.socket, timeout_s=300)
            ids = list(reference.prompt_ids)
            return client.generate(ids, max_tokens=NUM_TOKENS, ignore_eos=True).ids

        _check([ask(reference) for reference in references], references, engine)
        with ThreadPoolExecutor(len(references)) as pool:
            _check(list(pool.map(ask, references)), references, engine)
        pair.wait_settled()


@dataclass(frozen=True, slots=True)
class Roundings:
    """How far rounded numbers lead away from the exact ones."""

    max_error: float
    """The largest error of an answer's logits, as `MAX_BFLOAT16_ERROR` defines it."""
    flips: float
    """Share of all tokens after which another one leads."""


def rounding_errors(
    rounded: LocalEngine, exact: LocalEngine, references: Sequence[GreedyReference]
) -> Roundings:
    """Compare the logits of two engines after every token of the references."""
    errors, num_flips, num_tokens = [], 0, 0
    for ours, theirs in _all_logits(rounded, exact, references):
        spread = theirs - theirs.mean(dim=-1, keepdim=True)
        errors.append(float((ours - theirs).norm() / spread.norm()))
        num_flips += int((ours.argmax(dim=-1) != theirs.argmax(dim=-1)).sum())
        num_tokens += len(ours)
    return Roundings(max(errors), num_flips / num_tokens)


def _all_logits(
    one: LocalEngine, other: LocalEngine, references: Sequence[GreedyReference]
) -> Iterator[tuple[Tensor, Tensor]]:
    for reference in references:
        forced = [*reference.prompt_ids, *reference.ids]
        yield one.prompt_logits(forced), other.prompt_logits(forced)


def _check(
    answers: Sequence[Sequence[int]], references: Sequence[GreedyReference], engine: LocalEngine
) -> None:
    for answer, reference in zip(answers, references, strict=True):
        reference.check(answer, lambda ids: engine.prompt_logits(ids).cpu())
