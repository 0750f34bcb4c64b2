"""One step of prefilld's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from prefilld.clients import Client
from prefilld.prefill import run_chunks
from prefilld.request import Request
from prefilld.scheduler import Chunk
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from shared.engine.runner import ModelRunner
from shared.kv.pool import LocalPool
from tests.unit.prefilld.recorders import new_request


def request_of(num_tokens: int, blocks: list[int]) -> Request:
    request = new_request(cast("Client", SimpleNamespace()), num_tokens=num_tokens)
    request.blocks = blocks
    return request


def test_only_the_chunk_that_ends_a_prompt_samples(host: ModelHost) -> None:
    """Its token is that of a whole prompt computed alone, whatever shares the steps."""
    pool = LocalPool(host.layout, fill=float("nan"))
    runner = ModelRunner(host.model, pool.kv, host.layout)
    long, short = request_of(40, [9, 2, 5]), request_of(7, [3])
    first = run_chunks(runner, [Chunk(long, 0, 30), Chunk(short, 0, 7)]).token_ids
    assert first[0] is None
    (second,) = run_chunks(runner, [Chunk(long, 30, 10)]).token_ids
    engine = LocalEngine(host.model, num_blocks=16)
    for token_id, request in ((first[1], short), (second, long)):
        ((expected,),) = engine.generate([request.token_ids], max_tokens=1)
        assert token_id == expected
