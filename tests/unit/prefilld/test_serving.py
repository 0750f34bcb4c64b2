"""Accepted requests: queued, computed, answered with the first token, handed over or ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from prefilld.request import RequestState
from protocol import messages as wire
from protocol.errors import RequestError
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from shared.kv.holds import Hold
from tests.unit.prefilld.world import User, World
from tests.unit.shared.daemon.kit import turns, until

Play = Callable[..., None]


def ids_of(num_tokens: int) -> list[Any]:
    return [2 + (7 * index) % 250 for index in range(num_tokens)]


def generate(num_tokens: int = 10, **options: Any) -> wire.Generate:  # noqa: ANN401 - GENERATE's fields
    return wire.Generate(
        prompt=ids_of(num_tokens), **{"ignore_eos": True, "max_tokens": 4} | options
    )


def is_all_back(world: World) -> bool:
    """Whether nobody holds a block: each is free, or kept as cache."""
    counts = world.allocator.counts()
    return counts.free + counts.cached == counts.total - 1


def occupy(world: World, num_blocks: int) -> Hold:
    """Take blocks away from everybody else."""
    hold = world.holds.take(num_blocks * world.host.layout.block_size)
    assert hold is not None, "so many are free"
    return hold


class Gate:
    """Holds the engine thread, so that a test decides when a step ends."""

    def __init__(self, world: World) -> None:
        import threading

        self._open = threading.Event()
        self._entered = asyncio.Event()
        loop = asyncio.get_running_loop()
        execute = world.serving.prefill._prefiller._runner.execute

        def gated(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the runner's
            loop.call_soon_threadsafe(self._entered.set)
            assert self._open.wait(20)
            return execute(*args, **options)

        world.serving.prefill._prefiller._runner.execute = gated  # type: ignore[method-assign]

    async def entered(self) -> None:
        await self._entered.wait()
        self._entered.clear()

    def open(self) -> None:
        self._open.set()


# --- the way through -------------------------------------------------------------------------


def test_a_request_is_accepted_computed_answered_and_handed_over(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate())
        await user.until_received(wire.Tokens)
        assert user.kinds == [wire.Accepted, wire.Tokens]
        await until(lambda: world.link.handed_over)
        (handoff,) = world.link.sent
        assert isinstance(handoff, wire.Handoff)
        assert handoff.request.ids == user.tokens[0].ids
        assert handoff.request.delivered == 1
        assert handoff.num_tokens == 10
        assert not world.serving.is_idle
        world.desk.lending.on_adopt(handoff.lease)
        assert world.serving.is_idle
        world.desk.lending.on_release(handoff.lease)
        assert is_all_back(world)

    play(scene)


def test_the_first_token_is_that_of_one_engine_alone(play: Play, host: ModelHost) -> None:
    """Chunked, in a pool of NaN, behind other blocks: nothing of it may show."""

    async def scene(world: World) -> None:
        taken = occupy(world, 2)
        world.start()
        world.open_link()
        user = world.ask(generate(50))
        await user.until_received(wire.Tokens)
        (answer,) = LocalEngine(host.model, num_blocks=16).generate([ids_of(50)], max_tokens=1)
        assert user.tokens[0].ids == answer
        world.holds.drop(taken)

    play(scene, prefilld__token_budget=16)


def test_a_long_prompt_is_announced_while_it_is_computed(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        world.ask(generate(50))
        await until(lambda: world.link.handed_over)
        kinds = [type(message) for message in world.link.sent]
        assert kinds == [wire.Chunk, wire.Chunk, wire.Chunk, wire.Handoff]
        named = [b for message in world.link.sent[:3] for b in message.blocks]  # type: ignore[attr-defined]
        assert named == world.link.sent[3].blocks[:3]  # type: ignore[attr-defined]

    play(scene, prefilld__token_budget=16)


def test_an_unstreamed_first_token_is_left_to_decoded(play: Play) -> None:
    """The whole answer is one frame."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate(stream=False))
        await until(lambda: world.link.handed_over)
        (handoff,) = world.link.sent
        assert isinstance(handoff, wire.Handoff)
        assert (handoff.request.delivered, handoff.request.stream) == (0, False)
        assert user.kinds == [wire.Accepted]

    play(scene)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_of_one_token_ends_here(play: Play, *, stream: bool) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate(max_tokens=1, stream=stream))
        end = await user.end()
        assert user.kinds == [wire.Accepted, wire.Tokens, wire.End]
        assert (end.reason, end.usage.completion_tokens) == ("length", 1)
        assert world.link.sent == []
        assert is_all_back(world)
        assert world.serving.is_idle

    play(scene)


def test_requests_wait_for_blocks_in_order(play: Play) -> None:
    """Blocks that come free wake the loop."""

    async def scene(world: World) -> None:
        one, others = occupy(world, 1), occupy(world, 13)
        world.start()
        world.open_link()
        first = world.ask(generate(20, max_tokens=1))
        await first.until_received(wire.Accepted)
        second = world.ask(generate(10, max_tokens=1))
        await second.until_received(wire.Accepted)
        await turns()
        assert world.serving.num_waiting == 2
        world.service.clock.advance(3)
        assert world.overview.status()["queue"] == {
            "judged": 0, "waiting": 2, "running": 0, "ready": 0, "sent": 0, "oldest_s": 3.0
        }  # fmt: skip
        world.holds.drop(one)
        world.serving.wake()
        end = await first.end()
        assert end.timings_ms.queue == 3_000
        await second.end()
        world.holds.drop(others)

    play(scene)


# --- ends ------------------------------------------------------------------------------------


def test_a_waiting_request_is_cancelled_at_once(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(generate())  # nothing computes
        await user.until_received(wire.Accepted)
        user.socket.send(wire.Cancel())
        end = await user.end()
        assert (end.reason, end.usage.completion_tokens) == ("cancelled", 0)
        assert world.serving.is_idle
        assert world.serving.num_waiting == 0

    play(scene)


def test_a_running_request_is_cancelled_after_its_step(play: Play) -> None:
    """The step still writes to its blocks: freed under it, they would be another request's."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        world.open_link()
        user = world.ask(generate())
        await gate.entered()
        user.socket.send(wire.Cancel())
        await turns(200)
        assert wire.End not in user.kinds
        assert world.allocator.counts().active == 1
        gate.open()
        end = await user.end()
        assert (end.reason, end.usage.completion_tokens) == ("cancelled", 0)
        assert is_all_back(world)
        assert world.link.sent == []

    play(scene)


def test_the_first_reason_for_an_end_is_the_one_that_is_told(play: Play) -> None:
    """A deadline that passes while a cancel waits for its step changes nothing."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        user = world.ask(generate())
        await gate.entered()
        user.socket.send(wire.Cancel())
        await until(lambda: world.serving._cancelled)
        world.serving.expire(1e12)
        gate.open()
        assert (await user.end()).reason == "cancelled"

    play(scene)


def test_a_client_that_vanishes_in_mid_prefill_gives_its_blocks_back(play: Play) -> None:
    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        user = world.ask(generate())
        await gate.entered()
        user.socket.close()
        await turns(200)
        gate.open()
        await until(lambda: is_all_back(world))
        assert world.serving.is_idle
        assert world.service.metrics.snapshot()['kvpair_requests_ended_total{reason="gone"}'] == 1

    play(scene)


def test_a_request_that_waits_for_decoded_is_cancelled_at_once(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        user = world.ask(generate())
        await until(lambda: world.desk.num_ready)
        user.socket.send(wire.Cancel())
        end = await user.end()
        assert (end.reason, end.usage.completion_tokens) == ("cancelled", 1)
        assert is_all_back(world)

    play(scene)


def test_a_request_that_was_sent_is_not_ours_to_cancel(play: Play) -> None:
    """It may be decoded's already."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        world.ask(generate())
        await until(lambda: world.link.handed_over)
        (request,) = world.desk.lending.requests
        world.serving.cancel(request.client)
        world.serving.expire(1e12)
        assert request.state is RequestState.SENT
        assert not world.serving.is_idle

    play(scene)


@pytest.mark.parametrize("code", ["no-room", "fd-lost", "draining"])
def test_a_rejected_request_waits_for_its_next_turn(play: Play, code: str) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link(blocks=1)
        user = world.ask(generate())
        await until(lambda: world.link.handed_over)
        (request,) = world.desk.lending.requests
        world.desk.lending.on_reject(request.lease_id or 0, code, "why")
        assert request.state is RequestState.READY
        assert world.desk.num_ready == 1
        await turns()
        assert user.kinds == [wire.Accepted, wire.Tokens]

    play(scene)


@pytest.mark.parametrize(("code", "told"), [("invalid-message", "internal"), ("too-large",) * 2])
def test_a_request_that_decoded_finds_wrong_fails(play: Play, code: str, told: str) -> None:
    """Handing it over again would be refused again; a decoded with a smaller pool says so."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate())
        await until(lambda: world.link.handed_over)
        (request,) = world.desk.lending.requests
        world.desk.lending.on_reject(request.lease_id or 0, code, "contradiction")
        error = await user.error()
        assert (error.code, error.message) == (told, "decoded refused it: contradiction")
        assert is_all_back(world)
        assert world.serving.is_idle

    play(scene)


@pytest.mark.parametrize("token_budget", [512, 4], ids=["handed-over", "announced"])
def test_what_decoded_died_under_twice_is_not_handed_to_a_third(
    play: Play, token_budget: int
) -> None:
    """Others wait for that one, and shall not lose it too."""

    async def scene(world: World) -> None:
        world.start()
        user = world.ask(generate(num_tokens=80))
        for _ in range(2):
            world.open_link()
            await until(lambda: world.desk.lending.requests)
            world.casualties.peer_lost(r.id for r in world.desk.lending.requests)
            world.casualties.peer_died()
            world.desk.link_lost(peer_is_gone=True, grace_s=10)
            world.serving.end_poisoned()
        error = await user.error()
        assert (error.code, error.retryable) == ("poisoned", False)
        await until(lambda: is_all_back(world))
        assert world.serving.is_idle

    play(scene, prefilld__token_budget=token_budget)


# --- deadlines -------------------------------------------------------------------------------


def test_a_request_that_waits_too_long_is_told_and_may_ask_again(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(generate())
        await user.until_received(wire.Accepted)
        world.serving.expire(world.service.now_s + 4.9)
        assert not world.serving.is_idle
        world.serving.expire(world.service.now_s + 5)
        error = await user.error()
        assert (error.code, error.retryable) == ("timeout", True)
        assert error.message.startswith("the prompt got no room in the pool within 5 s")
        assert world.serving.is_idle

    play(scene, limits__request_timeout_s=5)


def test_the_wait_for_decoded_has_a_deadline_of_its_own(play: Play) -> None:
    """It begins with the first token."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        user = world.ask(generate())
        await gate.entered()
        world.service.clock.advance(4)
        gate.open()
        await until(lambda: world.desk.num_ready)
        world.serving.expire(world.service.now_s + 4.9)
        assert world.desk.num_ready == 1
        world.serving.expire(world.service.now_s + 5)
        error = await user.error()
        assert error.message.startswith("decoded did not take the request within 5 s")
        assert is_all_back(world)

    play(scene, limits__request_timeout_s=5)


def test_a_running_request_times_out_after_its_step(play: Play) -> None:
    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        user = world.ask(generate())
        await gate.entered()
        world.serving.expire(1e12)
        world.serving.expire(1e12)
        await turns()
        assert wire.Error not in user.kinds
        gate.open()
        error = await user.error()
        assert error.message.startswith("the prompt was not computed within 300 s")
        assert is_all_back(world)

    play(scene)


def test_at_the_end_everybody_is_told(play: Play) -> None:
    async def scene(world: World) -> None:
        taken = occupy(world, 14)
        gate = Gate(world)
        world.start()
        users: list[User] = []
        for _ in range(2):
            users.append(world.ask(generate()))
            await users[-1].until_received(wire.Accepted)
        await gate.entered()
        world.serving.end_all(RequestError("draining", "bye", retryable=True))
        for user in users:
            error = await user.error()
            assert (error.code, error.message, error.retryable) == ("draining", "bye", True)
        assert world.serving.is_idle
        gate.open()
        world.holds.drop(taken)

    play(scene)


def test_blocks_of_a_withdrawn_lease_stay_lent_until_decoded_releases_them(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link(blocks=5)
        user = world.ask(generate(20))
        await until(lambda: world.desk.num_ready or world.link.handed_over)
        (request,) = world.desk.lending.requests
        assert request.state is RequestState.SENT
        world.desk.lending.on_reject(request.lease_id or 0, "invalid-message", "no")
        await user.error()
        assert is_all_back(world)

    play(scene, prefilld__token_budget=16)


@pytest.mark.parametrize("stream", [True, False])
def test_the_first_token_s_probability_goes_where_the_token_goes(
    play: Play, *, stream: bool
) -> None:
    """To the client with it, or to decoded, which will deliver it."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate(stream=stream, logprobs=2))
        await until(lambda: world.link.handed_over)
        if stream:
            await user.until_received(wire.Tokens)
        (handoff,) = world.link.sent
        assert isinstance(handoff, wire.Handoff)
        held = handoff.request.held_logprobs
        sent = [message for message in user.messages if isinstance(message, wire.Tokens)]
        told = sent[0].logprobs if stream else held
        assert told is not None
        (first,) = told
        assert len(first.top_ids) == 2
        assert first.top_ids[0] == handoff.request.ids[0], "greedy takes the likeliest"
        assert first.logprob == first.top_logprobs[0]
        assert (held == []) is stream

    play(scene)
