"""Requests that begin like others before them: what is found, told, announced, and kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from protocol import messages as wire
from protocol.errors import RequestError
from shared.daemon.model_host import ModelHost
from shared.engine.batch import SequenceStep
from shared.engine.collected import Collected
from shared.engine.local import LocalEngine
from shared.engine.prefilling import EagerPrefiller
from tests.support.exposition import Exposition
from tests.unit.prefilld.test_serving import Gate, generate, ids_of, is_all_back
from tests.unit.prefilld.world import User, World
from tests.unit.shared.daemon.kit import turns, until

Play = Callable[..., None]
BLOCK = 16


class AheadPrefiller:
    """Two steps in flight, as on a GPU; the test decides when they are done."""

    depth = 2

    def __init__(self, eager: EagerPrefiller) -> None:
        self._eager = eager
        self._sampled: deque[Collected[int | None]] = deque()
        self.are_done = False

    @property
    def num_in_flight(self) -> int:
        return len(self._sampled)

    def launch(self, steps: Sequence[SequenceStep]) -> int:
        self._eager.launch(steps)
        self._sampled.append(self._eager.collect())
        return 0

    def is_done(self) -> bool:
        return self.are_done

    def collect(self) -> Collected[int | None]:
        return self._sampled.popleft()


async def handed_over(world: World, num_handoffs: int) -> wire.Handoff:
    """Wait until so many requests were handed over; decoded takes that one and releases it."""
    await until(lambda: len(world.link.handed_over) >= num_handoffs)
    handoff = world.link.of(wire.Handoff)[num_handoffs - 1]
    assert isinstance(handoff, wire.Handoff)
    world.desk.lending.on_adopt(handoff.lease)
    world.desk.lending.on_release(handoff.lease)
    return handoff


async def accepted_of(user: User) -> wire.Accepted:
    accepted = await user.until_received(wire.Accepted)
    assert isinstance(accepted, wire.Accepted)
    return accepted


def num_computed(world: World) -> float:
    return world.service.metrics.snapshot()["kvpair_prompt_tokens_total"]


def test_a_prompt_is_computed_from_its_first_token_that_is_not_cached(
    play: Play, host: ModelHost
) -> None:
    """In a pool of NaN: the answer is right, so what it shares was there."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        world.ask(generate(50))
        first = await handed_over(world, 1)
        assert (first.request.cached_tokens, num_computed(world)) == (0, 50)
        user = world.ask(generate(52))
        assert (await accepted_of(user)).cached_tokens == 48
        second = await handed_over(world, 2)
        assert (second.request.cached_tokens, num_computed(world)) == (48, 54)
        assert second.blocks[:3] == first.blocks[:3]
        assert second.blocks[3] not in first.blocks[:3]
        (answer,) = LocalEngine(host.model, num_blocks=16).generate([ids_of(52)], max_tokens=1)
        assert second.request.ids == answer
        assert is_all_back(world)

    play(scene, prefilld__token_budget=16)


def test_cached_blocks_are_announced_before_anything_is_computed(play: Play) -> None:
    """So decoded pulls them while the rest is computed."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        world.ask(generate(50))
        first = await handed_over(world, 1)
        world.link.sent.clear()
        gate = Gate(world)
        world.ask(generate(50))
        await gate.entered()
        (chunk,) = world.link.sent
        assert isinstance(chunk, wire.Chunk)
        assert (chunk.first, chunk.blocks, chunk.event) == (0, first.blocks[:3], None)
        gate.open()
        await handed_over(world, 1)

    play(scene)


def test_what_is_launched_and_not_computed_is_shared_by_nobody(play: Play) -> None:
    """The step may be behind another one on the GPU, or fail."""

    async def scene(world: World) -> None:
        eager = world.serving.prefill._prefiller
        assert isinstance(eager, EagerPrefiller)
        ahead = AheadPrefiller(eager)
        world.serving.prefill._prefiller = ahead
        world.start()
        world.open_link()
        world.ask(generate(40))
        await until(lambda: ahead.num_in_flight == 2)
        early = world.ask(generate(40))
        assert (await accepted_of(early)).cached_tokens == 0, "32 are launched"
        ahead.are_done = True
        await handed_over(world, 1)
        await handed_over(world, 2)
        late = world.ask(generate(40))
        assert (await accepted_of(late)).cached_tokens == 32
        assert (await handed_over(world, 3)).request.cached_tokens == 32

    play(scene, prefilld__token_budget=16)


def test_what_a_cancelled_prompt_computed_is_kept(play: Play) -> None:
    """Whoever stops and asks again does not wait again."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        user = world.ask(generate(50))
        await gate.entered()
        user.socket.send(wire.Cancel())
        await until(lambda: world.serving._cancelled)
        gate.open()
        await user.end()
        counts = world.allocator.counts()
        assert (counts.cached, counts.active) == (2, 0)
        again = world.ask(generate(50))
        assert (await accepted_of(again)).cached_tokens == 2 * BLOCK

    play(scene, prefilld__token_budget=32)


@pytest.mark.parametrize(("num_resumed", "expected"), [(0, 32), (3, 32), (30, 40)])
def test_a_resumed_request_finds_its_prompt_and_counts_no_more_than_that(
    play: Play, num_resumed: int, expected: int
) -> None:
    """Its answer so far is computed with the prompt, and may be found as well."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        answer = list(range(20, 60))
        world.ask(wire.Generate(prompt=[*ids_of(40), *answer], ignore_eos=True, max_tokens=4))
        await handed_over(world, 1)
        resume = wire.Resume(
            attempt=1, seed=1, fingerprint=world.host.fingerprint, ids=answer[:num_resumed]
        )
        user = world.ask(generate(40, max_tokens=50, resume=resume))
        assert (await accepted_of(user)).cached_tokens == expected
        handoff = await handed_over(world, 2)
        assert handoff.request.cached_tokens == expected

    play(scene)


def test_an_answer_that_ends_here_tells_what_was_found(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        for expected in (0, 32):
            end = await world.ask(generate(40, max_tokens=1)).end()
            assert end.usage.cached_tokens == expected
        status: Any = world.overview.status()
        assert status["prefix_cache"] == {
            "hit_tokens": 32, "missed_tokens": 48, "evicted_blocks": 0, "blocks": 2
        }  # fmt: skip
        world.overview.declare(world.service.metrics)
        values = Exposition(world.service.metrics.exposition())
        assert values["kvpair_prefix_cache_hit_tokens_total"] == 32
        assert values["kvpair_prefix_cache_missed_tokens_total"] == 48
        assert values["kvpair_prefix_cache_evicted_blocks_total"] == 0
        assert values["kvpair_prefix_cache_blocks"] == 2

    play(scene)


def test_a_prompt_that_waits_for_blocks_finds_what_is_there_when_its_turn_comes(
    play: Play,
) -> None:
    """ACCEPTED tells of the moment it is sent; much may be computed or evicted until then."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        first = world.ask(generate(40, max_tokens=1))
        await gate.entered()
        second = world.ask(generate(40, max_tokens=1))
        assert (await accepted_of(second)).cached_tokens == 0
        gate.open()
        assert (await first.end()).usage.cached_tokens == 0
        assert (await second.end()).usage.cached_tokens == 32

    play(scene, prefilld__max_running=1)


def test_switched_off_it_finds_and_keeps_nothing(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        for _ in range(2):
            user = world.ask(generate(40, max_tokens=1))
            assert (await accepted_of(user)).cached_tokens == 0
            assert (await user.end()).usage.cached_tokens == 0
        counts = world.allocator.counts()
        assert (counts.cached, counts.free) == (0, counts.total - 1)

    play(scene, pool__prefix_cache=False)


def test_a_step_that_ends_after_its_requests_harms_nothing(play: Play) -> None:
    """As when the daemon ends in mid-step: their blocks are nobody's by then."""

    async def scene(world: World) -> None:
        gate = Gate(world)
        world.start()
        world.ask(generate(40))
        await gate.entered()
        world.serving.end_all(RequestError("draining", "bye", retryable=True))
        gate.open()
        await until(lambda: not world.serving.prefill._in_flight)
        await turns()
        counts = world.allocator.counts()
        assert (counts.cached, counts.free) == (0, counts.total - 1)

    play(scene)
