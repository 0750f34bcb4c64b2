"""The way in: judged, answered, queued, or told why not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from prefilld.admission import Bounds
from prefilld.casualties import Casualties
from prefilld.request import Prompt
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from tests.unit.prefilld.world import World
from tests.unit.shared.daemon.kit import RecordingService, run, turns, until

Scene = Callable[[World], Coroutine[Any, Any, None]]
Play = Callable[..., None]


@pytest.fixture
def play(make_service: Callable[..., RecordingService], host: ModelHost) -> Callable[..., None]:
    """Run a scene in a world that computes nothing by itself."""

    def play_scene(scene: Scene, **settings: object) -> None:
        service = make_service(**settings)

        async def whole() -> None:
            world = World(service, host, EngineThread(num_threads=1))
            try:
                await scene(world)
            finally:
                await world.close()

        run(whole())

    return play_scene


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """Whatever is logged."""
    with capture_logs() as lines:
        yield lines


def test_accepted_tells_what_a_client_needs_to_resume(play: Play, host: ModelHost) -> None:
    async def scene(world: World) -> None:
        user = world.ask(wire.Generate(prompt=[1, 2, 3], id="mine", sampling=wire.Sampling(seed=4)))
        accepted = await user.until_received(wire.Accepted)
        assert accepted == wire.Accepted(
            id="mine", seed=4, prompt_tokens=3, cached_tokens=0, fingerprint=host.fingerprint
        )

    play(scene)


def test_without_an_id_and_a_seed_they_are_drawn_and_told(play: Play) -> None:
    async def scene(world: World) -> None:
        users = [world.ask(wire.Generate(prompt=[1])) for _ in range(2)]
        first, second = [await user.until_received(wire.Accepted) for user in users]
        assert isinstance(first, wire.Accepted)
        assert isinstance(second, wire.Accepted)
        assert first.id != second.id
        assert first.seed != second.seed

    play(scene)


def test_a_refused_request_is_told_why_and_counted(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(wire.Generate(prompt=[999]))
        error = await user.error()
        assert (error.code, error.retryable) == ("invalid-request", False)
        await user.until(lambda: user.closed)
        series = 'kvpair_requests_failed_total{code="invalid-request"}'
        assert world.service.metrics.snapshot()[series] == 1
        assert world.serving.is_idle

    play(scene)


def test_the_bounds_are_those_of_the_moment(play: Play) -> None:
    """Decoded tells its pool's size when the link opens."""

    async def scene(world: World) -> None:
        world.bounds = Bounds(prefill_blocks=15, decode_blocks=1, max_tokens_default=8)
        user = world.ask(wire.Generate(prompt=[1], max_tokens=20))
        assert (await user.error()).code == "too-large"
        world.bounds = Bounds(prefill_blocks=15, decode_blocks=2, max_tokens_default=8)
        user = world.ask(wire.Generate(prompt=[1], max_tokens=20))
        await user.until_received(wire.Accepted)

    play(scene)


def test_check_answers_and_queues_nothing(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(wire.Check(prompt=[1, 2], max_tokens=20))
        checked = await user.until_received(wire.Checked)
        assert checked == wire.Checked(
            prompt_tokens=2, max_tokens=20, blocks=1, total_blocks=2, fits=True
        )
        await user.until(lambda: user.closed)
        assert world.serving.num_waiting == 0

    play(scene)


def test_an_invalid_check_is_an_error(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(wire.Check(prompt=[999]))
        assert (await user.error()).code == "invalid-request"

    play(scene)


def test_a_full_queue_is_busy_and_says_when_to_come_back(play: Play) -> None:
    async def scene(world: World) -> None:
        for _ in range(2):
            await world.ask(wire.Generate(prompt=[1])).until_received(wire.Accepted)
        error = await world.ask(wire.Generate(prompt=[1])).error()
        assert (error.code, error.retryable, error.retry_after_ms) == ("busy", True, 1000)
        assert error.message == "the queue is full (2 waiting); try again in 1 s"
        assert world.serving.num_waiting == 2

    play(scene, prefilld__max_waiting=2)


def take_nothing_for_quick(world: World) -> None:
    """Have every request judged on the other thread."""
    world.reception._admission.is_quick = lambda _: False  # type: ignore[method-assign]


def test_a_quick_request_is_judged_at_once_unless_another_is_before_it(play: Play) -> None:
    """Waking two threads takes longer; but nobody is overtaken by a shorter prompt."""

    async def scene(world: World) -> None:
        may_judge, order = threading.Event(), []
        judge = world.reception._admission.judge

        def noting_judge(message: wire.Generate, bounds: Bounds) -> Prompt:
            order.append((message.id, threading.current_thread() is threading.main_thread()))
            return judge(message, bounds)

        world.reception._admission.judge = noting_judge  # type: ignore[method-assign]
        for name, prompt in (("ids", [1]), ("text", "hello")):
            user = world.ask(wire.Generate(prompt=prompt, id=name, raw=True))
            await user.until_received(wire.Accepted)
        world.reception._judges.submit(may_judge.wait)
        users = [
            world.ask(wire.Generate(prompt=prompt, id=name, raw=True))
            for name, prompt in (("long", "ab " * 400), ("behind", [1]))
        ]
        await until(lambda: len(world.reception.judging_since_s) == len(users))
        may_judge.set()
        await users[1].until_received(wire.Accepted)
        assert order == [("ids", True), ("text", True), ("long", False), ("behind", False)]

    play(scene)


def test_a_crowd_of_quick_requests_lets_others_have_their_turn(play: Play) -> None:
    """What else the loop has to do, such as a hand-over, waits for one of them and not for all."""

    async def scene(world: World) -> None:
        rounds, judged = 0, []
        judge = world.reception._admission.judge
        loop = asyncio.get_running_loop()

        def count_round() -> None:
            nonlocal rounds
            rounds += 1
            loop.call_soon(count_round)

        def noting_judge(message: wire.Generate, bounds: Bounds) -> Prompt:
            judged.append((message.id, rounds))
            return judge(message, bounds)

        world.reception._admission.judge = noting_judge  # type: ignore[method-assign]
        count_round()
        names = [f"request-{number}" for number in range(6)]
        users = [world.ask(wire.Generate(prompt=[1], id=name)) for name in names]
        for user in users:
            await user.until_received(wire.Accepted)
        assert [name for name, _ in judged] == names
        assert len({in_round for _, in_round in judged}) == len(names), "one in each round"

    play(scene)


def test_a_crowd_that_left_keeps_nobody_out(play: Play) -> None:
    """Who asks and hangs up waits for nothing; the next one is not told that the queue is full."""

    async def scene(world: World) -> None:
        reception = world.reception
        await reception._quick_turn.acquire()
        users = [world.ask(wire.Generate(prompt=[1])) for _ in range(3)]
        await until(lambda: len(reception.judging_since_s) == len(users))
        for user in users:
            user.socket.close()
        await until(lambda: not any(client.is_open for client in reception._judging_since_s))
        late = world.ask(wire.Generate(prompt=[1]))
        await until(lambda: len(reception.judging_since_s) > len(users))
        reception._quick_turn.release()
        await late.until_received(wire.Accepted)
        await until(lambda: reception.is_idle)
        assert world.serving.num_waiting == 1

    play(scene, prefilld__max_waiting=3)


def test_requests_that_are_being_judged_count_as_waiting(play: Play) -> None:
    """Otherwise a burst would be tokenised without bound before the queue is looked at."""

    async def scene(world: World) -> None:
        may_judge = threading.Event()
        judge = world.reception._admission.judge

        def slow_judge(*args: Any) -> Prompt:  # noqa: ANN401 - as `judge`
            assert may_judge.wait(20)
            return judge(*args)

        world.reception._admission.judge = slow_judge  # type: ignore[method-assign]
        take_nothing_for_quick(world)
        users = [world.ask(wire.Generate(prompt=[1])) for _ in range(3)]
        assert (await users[2].error()).code == "busy"
        assert not world.reception.is_idle
        may_judge.set()
        for user in users[:2]:
            await user.until_received(wire.Accepted)
        assert world.reception.is_idle

    play(scene, prefilld__max_waiting=2)


def test_a_draining_daemon_takes_nothing_new(play: Play) -> None:
    async def scene(world: World) -> None:
        world.service.drain(reason="test")
        error = await world.ask(wire.Generate(prompt=[1])).error()
        assert (error.code, error.retryable) == ("draining", True)
        error = await world.ask(wire.Check(prompt=[1])).error()
        assert error.code == "draining"

    play(scene)


def test_a_client_that_left_while_it_was_judged_is_not_queued(play: Play) -> None:
    async def scene(world: World) -> None:
        may_judge = threading.Event()
        take_nothing_for_quick(world)
        world.reception._judges.submit(may_judge.wait)  # the one thread is busy with another
        user = world.ask(wire.Generate(prompt="hello", raw=True))
        await until(lambda: not world.reception.is_idle)
        user.socket.close()
        await turns()
        may_judge.set()
        await until(lambda: world.reception.is_idle)
        await turns()
        assert world.serving.is_idle
        assert world.serving.num_waiting == 0

    play(scene)


def test_a_cancel_that_came_with_the_request_ends_it_after_it_was_accepted(play: Play) -> None:
    """ACCEPTED must come first, or the client could not tell what was cancelled."""

    async def scene(world: World) -> None:
        user = world.ask(wire.Generate(prompt="hello", raw=True))
        user.socket.send(wire.Cancel())
        end = await user.end()
        assert end.reason == "cancelled"
        assert user.kinds == [wire.Accepted, wire.End]
        assert world.serving.is_idle

    play(scene)


# --- resuming --------------------------------------------------------------------------------


def die(casualties: Casualties) -> None:
    casualties.peer_lost([])
    casualties.peer_died()


def resume(host: ModelHost, ids: list[int]) -> wire.Resume:
    return wire.Resume(attempt=1, seed=7, fingerprint=host.fingerprint, ids=ids)


def test_a_resumed_answer_computes_what_the_client_has_and_sends_it_not_again(
    play: Play, host: ModelHost
) -> None:
    async def scene(world: World) -> None:
        world.start()
        user = world.ask(
            wire.Generate(
                prompt=[10, 11],
                max_tokens=9,
                ignore_eos=True,
                resume=resume(host, [5, 6, 7]),
            )
        )
        tokens = await user.until_received(wire.Tokens)
        assert isinstance(tokens, wire.Tokens)
        assert (tokens.index, len(tokens.ids)) == (3, 1)
        assert isinstance(user.messages[0], wire.Accepted)
        assert user.messages[0].seed == 7
        await until(lambda: world.desk.num_ready)
        world.open_link()
        (handoff,) = world.link.sent
        assert isinstance(handoff, wire.Handoff)
        assert handoff.num_tokens == 5
        assert handoff.request.ids == [5, 6, 7, *tokens.ids]
        assert (handoff.request.delivered, handoff.request.resumed) == (4, 3)

    play(scene)


def test_a_request_under_which_decoded_died_twice_is_refused(play: Play, host: ModelHost) -> None:
    """Whether it comes back for the rest or asks from the start."""

    async def scene(world: World) -> None:
        rest = wire.Generate(prompt=[10], id="r", resume=resume(host, [5]))
        world.casualties.adopted("r")
        die(world.casualties)
        await world.ask(rest).until_received(wire.Accepted)
        world.casualties.adopted("r")
        die(world.casualties)
        for request in (rest, wire.Generate(prompt=[10], id="r")):
            error = await world.ask(request).error()
            assert (error.code, error.retryable) == ("poisoned", False)
        await world.ask(wire.Generate(prompt=[10], id="s")).until_received(wire.Accepted)

    play(scene)


def test_a_name_that_is_used_again_is_another_request(play: Play, host: ModelHost) -> None:
    """Only a client that comes back says that its answer had broken off."""

    async def scene(world: World) -> None:
        for _ in range(3):
            user = world.ask(wire.Generate(prompt=[10], id="r"))
            await user.until_received(wire.Accepted)
            world.casualties.adopted("r")
            die(world.casualties)

    play(scene)


@pytest.mark.parametrize(
    ("ids", "options", "reason"),
    [
        ([5, 0], {}, "stop"),
        ([5, 6], {"max_tokens": 2}, "length"),
    ],
)
def test_a_whole_answer_is_not_computed_any_further(
    play: Play,
    host: ModelHost,
    logs: list[Any],
    ids: list[int],
    options: dict[str, Any],
    reason: str,
) -> None:
    """The client had all of it, and lost only END."""

    async def scene(world: World) -> None:
        user = world.ask(wire.Generate(prompt=[10], resume=resume(host, ids), **options))
        end = await user.end()
        assert (end.reason, end.usage.completion_tokens) == (reason, 2)
        assert user.kinds == [wire.Accepted, wire.End]
        assert world.serving.is_idle
        await user.until(lambda: user.closed)
        ended = [name for name in world.service.metrics.snapshot() if "requests_ended" in name]
        assert ended == [f'kvpair_requests_ended_total{{reason="{reason}"}}'], "never queued"
        told = [line for line in logs if line["event"] == "request.ended"]
        assert [(line["reason"], line["completion_tokens"]) for line in told] == [(reason, 2)]

    play(scene)
