"""Direct access: prompts are read where they are, and moved when their owner dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoded.access import Access
from decoded.in_place import MOVE_S
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from tests.unit.decoded.samples import CHUNK
from tests.unit.decoded.world import (
    MakeTurns,
    World,
    answer_of,
    eager_turns,
    ids_of,
    overlapped_turns,
)
from tests.unit.shared.daemon.kit import until

Play = Callable[..., list[Any]]

DIRECT = Access("direct", "the test says so")


@pytest.fixture(params=[eager_turns, overlapped_turns])
def make_turns(request: pytest.FixtureRequest) -> MakeTurns:
    """Every scene is played with both kinds of turns."""
    chosen: MakeTurns = request.param
    return chosen


def expected(host: ModelHost, prompt: list[int], *, max_tokens: int = 6) -> list[int]:
    """Return what one process alone answers behind the first token."""
    engine = LocalEngine(host.model, num_blocks=16)
    (answer,) = engine.generate([prompt], max_tokens=max_tokens, ignore_eos=True)
    return answer[1:]


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "total", "num_own"),
    [(20, [5, 3], 2, 1), (16, [5], 2, 1), (5, [4], 1, 1), (35, [9, 2, 6], 3, 1)],
)
def test_an_answer_over_blocks_in_place_is_that_of_one_process(
    play: Play, host: ModelHost, num_tokens: int, blocks: list[int], total: int, num_own: int
) -> None:
    """Only a block that is partly filled is copied; the lease ends with the answer."""

    async def scene(world: World) -> None:
        world.access = DIRECT
        world.start()
        prefilld, _ = await world.linked()
        prompt = ids_of(num_tokens)
        user = prefilld.hand_over(prompt, blocks, total_blocks=total)
        await prefilld.until_received(wire.Adopt)
        assert world.allocator.counts().active <= num_own
        await user.until_received(wire.End)
        assert answer_of(user) == expected(host, prompt)
        await prefilld.until_received(wire.Release)
        assert len(prefilld.of(wire.Release)) == 1
        pulled = world.service.metrics.snapshot()["kvpair_pulled_bytes_total"]
        assert pulled == (num_tokens % 16 > 0) * world.pool.layout.block_bytes
        await world.settled()

    play(scene)


def test_there_is_nothing_to_pull_ahead(play: Play) -> None:
    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, _ = await world.linked()
        prefilld.page.publish(0, 1)
        prefilld.socket.send(CHUNK)
        await prefilld.until_received(wire.NoChunk)
        assert world.is_all_free

    play(scene)


def test_a_revoked_prompt_ends_its_answer_before_a_token_of_it_leaves(play: Play) -> None:
    """The blocks may hold somebody else's prompt by then."""

    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3], max_tokens=12, total_blocks=2)
        await until(lambda: world.book.living)
        prefilld.page.publish(0, 2)
        world.start()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert (error.code, error.retryable) == ("prefill-lost", True)
        assert answer_of(user) == []
        await world.settled()

    play(scene)


def test_an_answer_outlives_prefilld_in_blocks_of_our_own(play: Play, host: ModelHost) -> None:
    """It is moved while it runs, and then the mapping is closed for the successor."""

    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, session = await world.linked()
        prompt = ids_of(37)
        user = prefilld.hand_over(prompt, [9, 2, 6], max_tokens=50, total_blocks=6)
        await prefilld.until_received(wire.Adopt)
        prefilld.socket.close()
        await until(lambda: session.is_lost)
        world.start()
        await until(lambda: world.tick() or not session.is_mapped)
        prefilld.pool.kv.fill_(float("nan"))
        await user.until_received(wire.End)
        assert answer_of(user) == expected(host, prompt, max_tokens=50)
        await world.settled()

    play(scene)


def test_an_answer_that_there_is_no_room_to_move_ends(play: Play) -> None:
    """The successor needs the memory more than this answer does; its client asks again."""

    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, session = await world.linked()
        user = prefilld.hand_over(ids_of(37), [9, 2, 6], max_tokens=12, total_blocks=4)
        await prefilld.until_received(wire.Adopt)
        taken = world.scheduler.reserve(world.allocator.num_free)
        assert taken is not None
        world.start()
        await until(lambda: world.scheduler.num_running)
        prefilld.socket.close()
        await until(lambda: session.is_lost)
        world.tick()
        world.service.clock.advance(MOVE_S)
        world.tick()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert error.code == "prefill-lost"
        world.scheduler.unreserve(taken)
        await until(lambda: world.tick() or not session.is_mapped)
        await world.settled()

    play(scene, decoded__swap_gib=0)


def test_a_cancelled_answer_gives_its_lease_back(play: Play) -> None:
    async def scene(world: World) -> None:
        world.access = DIRECT
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3], max_tokens=200, total_blocks=14)
        await user.until_received(wire.Tokens)
        user.socket.send(wire.Cancel())
        await prefilld.until_received(wire.Release)
        await world.settled()

    play(scene)
