"""One step of prefilld's engine: a chunk of each of several prompts, in one forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.daemon.model_host import sampling_params
from shared.engine.batch import SequenceStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefilld.request import Request
    from prefilld.scheduler import Chunk
    from shared.engine.runner import ModelRunner


def run_chunks(runner: ModelRunner, chunks: Sequence[Chunk[Request]]) -> tuple[int | None, ...]:
    """Compute chunks; when this returns, their keys and values are in the pool.

    On the engine thread.

    Returns:
        One for each chunk: the first token of the answer where the chunk ends its prompt, else
        None.
    """
    return runner.execute([_step_of(chunk) for chunk in chunks]).token_ids


def _step_of(chunk: Chunk[Request]) -> SequenceStep:
    request = chunk.request
    return SequenceStep(
        token_ids=request.token_ids[chunk.start : chunk.start + chunk.length],
        start_position=chunk.start,
        block_table=request.blocks,
        sampling=sampling_params(request.prompt.sampling) if chunk.is_last else None,
    )
