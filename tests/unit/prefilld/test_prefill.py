"""One step of prefilld's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from prefilld.clients import Client
from prefilld.prefill import launch_chunks, wait_for_chunks
from prefilld.request import Request
from prefilld.scheduler import Chunk
from shared.daemon.model_host import ModelHost
from shared.engine.collected import Collected
from shared.engine.local import LocalEngine
from shared.engine.prefilling import EagerPrefiller
from shared.engine.runner import ModelRunner
from shared.kv.control_page import ControlPage
from shared.kv.pool import LocalPool
from tests.unit.prefilld.recorders import hold_of, new_request


def request_of(num_tokens: int, blocks: list[int]) -> Request:
    request = new_request(cast("Client", SimpleNamespace()), num_tokens=num_tokens)
    request.hold = hold_of(blocks)
    return request


def test_only_the_chunk_that_ends_a_prompt_samples(host: ModelHost) -> None:
    """Its token is that of a whole prompt computed alone, whatever shares the steps."""
    page = ControlPage.create(1)
    pool = LocalPool(host.layout, fill=float("nan"))
    prefiller = EagerPrefiller(ModelRunner(host.model, pool.kv, host.layout))

    def compute(*chunks: Chunk[Request]) -> tuple[int | None, ...]:
        assert launch_chunks(prefiller, chunks) is None, "it is computed by then"
        collected = wait_for_chunks(prefiller, chunks, page, lambda: True)
        assert collected is not None, "what is done is not waited for"
        return collected.token_ids

    long, short = request_of(40, [9, 2, 5]), request_of(7, [3])
    first = compute(Chunk(long, 0, 30), Chunk(short, 0, 7))
    assert first[0] is None
    (second,) = compute(Chunk(long, 30, 10))
    engine = LocalEngine(host.model, num_blocks=16)
    for token_id, request in ((first[1], short), (second, long)):
        ((expected,),) = engine.generate([request.token_ids], max_tokens=1)
        assert token_id == expected
    page.close()


def test_the_control_page_tells_the_first_token_to_a_decoded_that_waits_for_it() -> None:
    page, chunk = ControlPage.create(3), Chunk(request_of(7, [3]), 0, 7)
    chunk.request.first_token_place = (2, 5)
    other = Chunk(request_of(7, [4]), 0, 7)
    page.publish(2, 5)
    prefiller = Running(depth=1, looks=0, token_ids=(None, 7))
    wait_for_chunks(prefiller, [chunk, other], page, lambda: False)
    assert page.first_token(2, 5) is None, "its prompt goes on"
    wait_for_chunks(Running(depth=1, looks=0), [chunk], page, lambda: False)
    assert page.first_token(2, 5) == 7
    page.close()


class Running:
    """A step that takes its time, and room for `depth` of them."""

    def __init__(self, *, depth: int, looks: int, token_ids: tuple[int | None, ...] = (7,)) -> None:
        self.depth, self.num_in_flight, self._looks = depth, 1, looks
        self._token_ids = token_ids

    def launch(self, _steps: object) -> int | None:
        return None

    def is_done(self) -> bool:
        self._looks -= 1
        return self._looks < 0

    def collect(self) -> Collected[int | None]:
        return Collected(token_ids=self._token_ids)


def wait(prefiller: Running, *, is_interrupted: bool) -> tuple[int | None, ...] | None:
    page = ControlPage.create(1)
    chunks = [Chunk(request_of(7, [3]), 0, 7)]
    try:
        collected = wait_for_chunks(prefiller, chunks, page, lambda: is_interrupted)
        return None if collected is None else collected.token_ids
    finally:
        page.close()


def test_a_wait_is_interrupted_while_there_is_room_for_another_step() -> None:
    """A prompt that arrives meanwhile is launched behind the running one."""
    assert wait(Running(depth=2, looks=5), is_interrupted=True) is None
    assert wait(Running(depth=2, looks=5), is_interrupted=False) == (7,)


def test_without_room_a_wait_is_not_interrupted() -> None:
    assert wait(Running(depth=1, looks=5), is_interrupted=True) == (7,)
