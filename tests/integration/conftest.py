"""The models that integration tests run on, and transformers' answers to hold others against."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shared.model.fetch import fetch_model
from shared.model.loader import LoadedModel, load_model_file
from tests.support.even_model import write_even_model
from tests.support.link_peers import load_host
from tests.support.margin_rule import GreedyReference
from tests.support.pair import write_tiny_model
from tests.support.questions import first_questions
from tests.support.solo import SoloEngine
from tests.support.transformers_reference import llama_for_causal_lm

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from shared.daemon.model_host import ModelHost

NUM_QUESTIONS = 20
NUM_TOKENS = 64


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """The embedded model's file, fetched on first use."""
    return fetch_model("smollm2-135m-instruct", notify=lambda line: print(line, file=sys.stderr))


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path, _one_torch_thread: None) -> LoadedModel:
    """The embedded model in float32.  Its tensors are shared: fuse a copy of the mapping."""
    return load_model_file(smollm2_file, "float32")


@pytest.fixture(scope="session")
def _one_torch_thread() -> None:
    """Compute on one thread: two that must share a core with daemons spin and take far longer."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_reference(smollm2: LoadedModel) -> LlamaForCausalLM:
    """Transformers' model over the same weights."""
    return llama_for_causal_lm(smollm2.spec, smollm2.tensors)


@pytest.fixture(scope="session")
def question_prompts(smollm2: LoadedModel) -> list[list[int]]:
    """Token ids of 20 questions, through the model's chat template."""
    source, questions = first_questions(NUM_QUESTIONS)
    print(f"questions: {source}", file=sys.stderr)
    assert smollm2.chat_template is not None
    with closing(smollm2.chat_template) as template:
        return [
            smollm2.tokenizer.encode(template.render([{"role": "user", "content": question}]))
            for question in questions
        ]


class GreedyReferences:
    """Transformers' greedy answers to the questions, each computed when it is first asked for."""

    def __init__(self, model: LlamaForCausalLM, prompts: list[list[int]]) -> None:
        self._model, self._prompts = model, prompts
        self._known: dict[int, GreedyReference] = {}

    def __getitem__(self, index: int) -> GreedyReference:
        """Return the answer to one question; 64 tokens take a few seconds."""
        if index not in self._known:
            self._known[index] = GreedyReference.compute(
                self._model, self._prompts[index], num_tokens=NUM_TOKENS
            )
        return self._known[index]


@pytest.fixture(scope="session")
def greedy_references(
    smollm2_reference: LlamaForCausalLM, question_prompts: list[list[int]]
) -> GreedyReferences:
    """What 20 greedy answers must equal; about a minute for all of them."""
    return GreedyReferences(smollm2_reference, question_prompts)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of one layer, as a file."""
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tiny_host(tiny_model: Path, _one_torch_thread: None) -> ModelHost:
    """The same model in memory, as a daemon that serves the file has it."""
    return load_host(tiny_model)


@pytest.fixture(scope="session")
def even_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model in whose answers rounding does not show, as a file."""
    return write_even_model(tmp_path_factory.mktemp("even"))


@pytest.fixture(scope="session")
def solo_engine(even_model: Path, _one_torch_thread: None) -> SoloEngine:
    """The same model in one process: what the pair's answers are held against."""
    return SoloEngine(load_host(even_model))
