"""Decode at batch 1 against transformers' `generate`: same weights, threads, prompt and length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from shared.model.loader import load_model_file
from tests.benchmarks.interleaved import MIN_PAIRS, Interleaved, time_interleaved
from tests.support.transformers_reference import generate_greedily, llama_for_causal_lm

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import LlamaForCausalLM

NUM_PROMPT_TOKENS = 128
NUM_NEW_TOKENS = 128
BLOCK_SIZE = 16

TEXT = (
    "The mill stood where two streams met, and in spring the wheel turned day and night. "
    "Its owner kept a book in which he wrote the level of the water every morning, the price of "
    "flour, and now and then a line about the weather or a guest. "
) * 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Transformers' model and the prompt for both sides.

    The other side is any callable that answers `prompt_ids` with `NUM_NEW_TOKENS` greedy ids, past
    the tokens that end an answer: in process, or through a daemon's socket.
    """

    reference: LlamaForCausalLM
    prompt_ids: list[int]

    def generate(self) -> list[int]:
        """Return transformers' answer."""
        return generate_greedily(self.reference, self.prompt_ids, num_tokens=NUM_NEW_TOKENS)

    def against(
        self, candidate: Callable[[], list[int]], *, num_pairs: int = MIN_PAIRS
    ) -> Interleaved:
        """Time both by turns, prefill included on both sides.

        Raises:
            ValueError: The candidate's answer has another length, so the times say nothing.
        """
        if (num_tokens := len(candidate())) != NUM_NEW_TOKENS:
            raise ValueError(f"the candidate answers with {num_tokens} tokens")
        return time_interleaved(self.generate, candidate, num_pairs=num_pairs)


def prepare(model_file: Path, *, num_threads: int) -> tuple[Contest, LocalEngine]:
    """Load the model once for both sides, float32; transformers shares the unfused tensors.

    Args:
        model_file: A GGUF file.
        num_threads: Torch's threads in this process, for both sides.
    """
    torch.set_num_threads(num_threads)
    loaded = load_model_file(model_file, "float32")
    prompt_ids = loaded.tokenizer.encode(TEXT)[:NUM_PROMPT_TOKENS]
    reference = llama_for_causal_lm(loaded.spec, loaded.tensors)
    num_blocks = 1 + -(-(NUM_PROMPT_TOKENS + NUM_NEW_TOKENS) // BLOCK_SIZE)
    engine = LocalEngine(
        Llama(loaded.spec, dict(loaded.tensors)), num_blocks=num_blocks, block_size=BLOCK_SIZE
    )
    return Contest(reference=reference, prompt_ids=prompt_ids), engine


def in_process(model_file: Path, *, num_threads: int, num_pairs: int = MIN_PAIRS) -> Interleaved:
    """Time the local engine against transformers."""
    contest, engine = prepare(model_file, num_threads=num_threads)

    def answer() -> list[int]:
        (ids,) = engine.generate([contest.prompt_ids], max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        return ids

    return contest.against(answer, num_pairs=num_pairs)
