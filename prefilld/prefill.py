"""One step of prefilld's engine: a chunk of each of several prompts, in one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.daemon.sampling import sampling_params
from shared.engine.batch import SequenceStep
from shared.engine.history import TokenHistory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefilld.request import Request
    from prefilld.scheduler import Chunk
    from shared.engine.runner import ModelRunner, StepResult


def run_chunks(runner: ModelRunner, chunks: Sequence[Chunk[Request]]) -> StepResult:
    """Compute chunks; when this returns, their keys and values are in the pool.

    On the engine thread.

    Returns:
        One token for each chunk: the first of the answer where the chunk ends its prompt, else
        None.
    """
    return runner.execute([_step_of(chunk) for chunk in chunks])


def _step_of(chunk: Chunk[Request]) -> SequenceStep:
    request = chunk.request
    token_ids = request.token_ids[chunk.start : chunk.start + chunk.length]
    if not chunk.is_last:
        return SequenceStep(
            token_ids=token_ids,
            start_position=chunk.start,
            block_table=request.blocks,
            sampling=None,
        )
    prompt = request.prompt
    sampling = sampling_params(
        prompt.sampling, min_tokens=prompt.min_tokens, end_ids=prompt.stop_ids
    )
    return SequenceStep(
        token_ids=token_ids,
        start_position=chunk.start,
        block_table=request.blocks,
        sampling=sampling,
        history=TokenHistory.needed_for(
            sampling, prompt=prompt.prompt_set, answer_ids=prompt.resumed_ids
        ),
        num_logprobs=prompt.logprobs,
    )
