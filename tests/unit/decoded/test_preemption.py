"""Answers that do not fit the pool together: who came last makes room, and no token is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from decoded.access import Access, Way
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from shared.ops.sampling import SamplingParams
from tests.support.exposition import Exposition
from tests.unit.decoded.test_overview import overview_of
from tests.unit.decoded.world import (
    MakeTurns,
    Prefilld,
    World,
    answer_of,
    eager_turns,
    ids_of,
    overlapped_turns,
)
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import until

Play = Callable[..., list[Any]]

NUM_TOKENS = 60
"""Of each prompt: four blocks, and one place for the token that follows."""
MAX_TOKENS = 120
"""Of each answer: with the prompt twelve blocks, of fifteen."""
NUM_ANSWERS = 3

DIRECT = Access("direct", "the test says so")


@pytest.fixture(params=[eager_turns, overlapped_turns])
def make_turns(request: pytest.FixtureRequest) -> MakeTurns:
    """Every scene is played with both kinds of turns."""
    chosen: MakeTurns = request.param
    return chosen


def prompt(number: int) -> list[int]:
    ids = ids_of(NUM_TOKENS)
    return ids[number:] + ids[:number]


def expected(host: ModelHost, number: int) -> list[int]:
    """Return what one process alone answers behind the first token."""
    engine = LocalEngine(host.model, num_blocks=16)
    sampling = SamplingParams(temperature=0, seed=1)
    (answer,) = engine.generate(
        [prompt(number)], max_tokens=MAX_TOKENS, ignore_eos=True, sampling=sampling
    )
    return list(answer[1:])


def hand_over(prefilld: Prefilld, number: int, **changes: Any) -> Recorder:  # noqa: ANN401
    """Hand a prompt over as prefilld does: with room for the next token and no more."""
    blocks = list(range(1 + 4 * number, 5 + 4 * number))
    fields = {"max_tokens": MAX_TOKENS, "total_blocks": 4} | changes
    return prefilld.hand_over(prompt(number), blocks, lease=number + 1, at=number, **fields)


def preemptions(world: World) -> float:
    return world.service.metrics.snapshot()["kvpair_preemptions_total"]


@pytest.mark.parametrize("way", ["pull", "direct"])
def test_every_answer_is_that_of_one_process_alone(play: Play, host: ModelHost, way: Way) -> None:
    """The arena is full of NaN at first, as the pool: nothing is read that was not copied."""

    async def scene(world: World) -> None:
        world.access = Access(way, "the test says so")
        world.start()
        prefilld, _ = await world.linked()
        users = [hand_over(prefilld, number) for number in range(NUM_ANSWERS)]
        for number, user in enumerate(users):
            await user.until_received(wire.End)
            assert answer_of(user) == expected(host, number)
        assert preemptions(world) >= 1
        await world.settled()
        moved = Exposition(world.service.metrics.exposition()).by_label(
            "kvpair_swapped_bytes_total", "direction"
        )
        assert moved["in"] == moved["out"] > 0

    logs = play(scene)
    events = [line["event"] for line in logs]
    assert events.count("sequence.preempted") == events.count("sequence.resumed") >= 1


def test_without_an_arena_an_answer_breaks_off_and_may_be_asked_for_again(
    play: Play, host: ModelHost
) -> None:
    """What it has sent is right; the oldest is not touched."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        users = [hand_over(prefilld, number) for number in range(NUM_ANSWERS)]
        error = await users[-1].until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert (error.code, error.retryable) == ("preempted", True)
        sent = answer_of(users[-1])
        assert sent == expected(host, NUM_ANSWERS - 1)[: len(sent)]
        await users[0].until_received(wire.End)
        assert answer_of(users[0]) == expected(host, 0)
        await world.settled()

    play(scene, decoded__swap_gib=0)


async def until_swapped(
    world: World, prefilld: Prefilld, num_answers: int = NUM_ANSWERS
) -> list[Recorder]:
    """Return the users of some answers, of which the last makes room and cannot come back yet."""
    users = [hand_over(prefilld, number) for number in range(num_answers)]
    await until(lambda: world.scheduler.swapped)
    return users


@pytest.mark.parametrize("how", ["cancel", "vanish"])
def test_who_is_not_wanted_any_more_leaves_from_wherever_it_is(play: Play, how: str) -> None:
    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        users = await until_swapped(world, prefilld)
        out = world.scheduler.swapped[-1]
        user = users[out.lease_id - 1]
        if how == "cancel":
            user.socket.send(wire.Cancel())
            end = await user.until_received(wire.End)
            assert isinstance(end, wire.End)
            assert end.reason == "cancelled"
        else:
            user.socket.close()
        for other in users:
            if other is not user:
                await other.until_received(wire.End)
        await world.settled()

    play(scene)


def test_the_end_of_the_link_is_nothing_to_who_is_out(play: Play, host: ModelHost) -> None:
    """What was pulled is ours, wherever it is."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, session = await world.linked()
        users = await until_swapped(world, prefilld)
        prefilld.socket.close()
        await until(lambda: world.tick() or not session.is_mapped)
        for number, user in enumerate(users):
            await user.until_received(wire.End)
            assert answer_of(user) == expected(host, number)
        await world.settled()

    play(scene)


def test_a_daemon_that_stops_tells_those_who_are_out_as_well(play: Play) -> None:
    """Its drain is over; blocks under a copy are free when the copy is."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        users = await until_swapped(world, prefilld)
        for sequence in world.book.living:
            world.book.fail(sequence, "draining", "decoded is shutting down")
        for user in users:
            error = await user.until_received(wire.Error)
            assert isinstance(error, wire.Error)
            assert error.code == "draining"
        await world.settled()

    play(scene)


def test_a_client_that_takes_nothing_is_cut_off_while_it_is_out(play: Play) -> None:
    """It holds places in the arena that others wait for."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        users = await until_swapped(world, prefilld)
        out = world.scheduler.swapped[-1]
        out.stream.close()  # as `close_stalled` does
        for number, user in enumerate(users, 1):
            if number != out.lease_id:
                await user.until_received(wire.End)
        await world.settled()
        ended = Exposition(world.service.metrics.exposition())
        assert ended['kvpair_requests_ended_total{reason="gone"}'] == 1

    play(scene)


def test_operators_see_who_is_out_and_for_how_long(play: Play) -> None:
    async def scene(world: World) -> None:
        overview = overview_of(world)
        overview.declare(world.service.metrics)
        world.start()
        prefilld, _ = await world.linked()
        users = await until_swapped(world, prefilld)
        await until(lambda: world.scheduler.swapped[0].preempted_ns)
        world.service.clock.advance(2.0)
        status: dict[str, Any] = overview.status()
        assert status["sequences"]["swapped"] >= 1
        assert status["swap"]["blocks"] == 15
        assert status["swap"]["used"] >= 4
        assert status["swap"]["oldest_s"] >= 2.0
        assert "swapped" in [row["state"] for row in status["requests"]["first"]]
        values = Exposition(world.service.metrics.exposition())
        assert values['kvpair_queue_requests{queue="swapped"}'] >= 1
        assert values['kvpair_queue_oldest_seconds{queue="swapped"}'] >= 2.0
        assert values['kvpair_swap_arena_blocks{state="used"}'] >= 4
        for user in users:
            await user.until_received(wire.End)
        await world.settled()
        values = Exposition(world.service.metrics.exposition())
        assert values['kvpair_queue_requests{queue="swapped"}'] == 0
        assert values['kvpair_swap_arena_blocks{state="free"}'] == 15
        assert values["kvpair_swapped_out_seconds_count"] >= 1

    play(scene)


def test_prefilld_is_told_at_once_that_nobody_new_is_let_in(play: Play) -> None:
    """What was adopted first comes first; room is told again when everybody is back."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        users = await until_swapped(world, prefilld)
        await until(
            lambda: any(each.credits.free_blocks == 0 for each in prefilld.of(wire.CreditUpdate))
        )
        late = prefilld.hand_over(ids_of(5), [13], lease=9, at=7, total_blocks=1)
        reject = await prefilld.until_received(wire.Reject)
        assert isinstance(reject, wire.Reject)
        assert (reject.code, reject.credits.free_blocks) == ("no-room", 0)
        await late.until(lambda: late.closed)
        for user in users:
            await user.until_received(wire.End)
        await world.settled()
        await until(lambda: prefilld.of(wire.CreditUpdate)[-1].credits.free_blocks == 15)

    play(scene)


def test_an_answer_that_can_never_fit_is_refused_with_the_number(play: Play) -> None:
    """Its prefilld believed in a larger pool, a former decoded's."""

    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        hand_over(prefilld, 0, max_tokens=16 * 15)
        reject = await prefilld.until_received(wire.Reject)
        assert isinstance(reject, wire.Reject)
        assert reject.code == "too-large"
        assert reject.message == "decoded's pool lacks 4 blocks for prompt and answer"
        await world.settled()

    play(scene)


# --- direct access, and prefilld dies ----------------------------------------------------------


@pytest.mark.parametrize("is_out", [False, True])
def test_answers_that_read_in_place_outlive_prefilld_in_the_arena(
    play: Play,
    host: ModelHost,
    is_out: bool,
) -> None:
    """Their prompts fit the pool no more than the answers do, and nobody is lost."""

    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, session = await world.linked()
        if is_out:
            world.start()
            users = await until_swapped(world, prefilld, 2)  # that the arena can hold
        else:
            users = [hand_over(prefilld, number) for number in range(NUM_ANSWERS)]
            await until(lambda: len(prefilld.of(wire.Adopt)) == NUM_ANSWERS)
        taken = None if is_out else world.scheduler.reserve(9)
        prefilld.socket.close()
        await until(lambda: session.is_lost)
        if not is_out:
            world.start()
        await until(lambda: world.tick() or not session.is_mapped)
        if taken is not None:
            assert preemptions(world) >= 1
            world.scheduler.unreserve(taken)
            world.wake()
        prefilld.pool.kv.fill_(float("nan"))
        for number, user in enumerate(users):
            await user.until_received(wire.End)
            assert answer_of(user) == expected(host, number)
        await world.settled()

    play(scene)


def test_who_ends_while_its_prompt_is_moved_to_the_arena_gives_everything_back(play: Play) -> None:
    async def scene(world: World) -> None:
        world.access = DIRECT
        prefilld, session = await world.linked()
        user = hand_over(prefilld, 0)
        await until(lambda: len(prefilld.of(wire.Adopt)) == 1)
        world.start()
        await until(lambda: answer_of(user))
        taken = world.scheduler.reserve(world.allocator.num_free)
        prefilld.socket.close()
        await until(lambda: session.is_lost)
        user.socket.send(wire.Cancel())
        await user.until_received(wire.End)
        assert taken is not None
        world.scheduler.unreserve(taken)
        await until(lambda: world.tick() or not session.is_mapped)
        await world.settled()

    play(scene)
