"""prefilld's engine calls: a chunk of each of several prompts, launched and waited for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from shared.daemon.sampling import sampling_params
from shared.engine.batch import SequenceStep
from shared.engine.history import TokenHistory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prefilld.request import Request
    from prefilld.scheduler import Chunk
    from shared.engine.collected import Collected
    from shared.engine.prefilling import Prefiller
    from shared.kv.control_page import ControlPage

POLL_S = 20e-6
"""Pause between two looks at a running step; the interpreter is free meanwhile."""


def launch_chunks(prefiller: Prefiller, chunks: Sequence[Chunk[Request]]) -> int | None:
    """Begin to compute chunks.  On the engine thread.

    Returns:
        The slot of the event after which their keys and values are in the pool; None where they
        are there already.
    """
    return prefiller.launch([_step_of(chunk) for chunk in chunks])


def wait_for_chunks(
    prefiller: Prefiller,
    chunks: Sequence[Chunk[Request]],
    page: ControlPage,
    is_interrupted: Callable[[], bool],
) -> Collected[int | None] | None:
    """Wait for the oldest step in flight.  On the engine thread.

    Args:
        prefiller: What computes; a step is in flight.
        chunks: Its chunks.
        page: Where a first token is told that decoded waits for: from here and not from the event
            loop, which first has to wake up.
        is_interrupted: Whether there is more to launch; asked while there is room for it.

    Returns:
        For each chunk the first token of the answer where the chunk ends its prompt, else None.
        None in place of all where the wait was interrupted.
    """
    is_full = prefiller.num_in_flight >= prefiller.depth
    while not prefiller.is_done():
        if not is_full and is_interrupted():
            return None
        time.sleep(POLL_S)
    collected = prefiller.collect()
    for chunk, token_id in zip(chunks, collected.token_ids, strict=True):
        if token_id is not None and chunk.request.first_token_place is not None:
            page.tell_first_token(*chunk.request.first_token_place, token_id)
    return collected


def _step_of(chunk: Chunk[Request]) -> SequenceStep:
    request, sampling = chunk.request, None
    if chunk.is_last:
        prompt = request.prompt
        sampling = sampling_params(
            prompt.sampling, min_tokens=prompt.min_tokens, end_ids=prompt.stop_ids
        )
        request.history = TokenHistory.needed_for(
            sampling,
            num_logprobs=prompt.logprobs,
            prompt=prompt.prompt_set,
            answer_ids=prompt.resumed_ids,
        )
    return SequenceStep(
        token_ids=request.token_ids[chunk.start : chunk.start + chunk.length],
        start_position=chunk.start,
        block_table=request.blocks,
        sampling=sampling,
        history=request.history,
    )
