"""A first step that is begun before HANDOFF: the same answers, and nothing is left of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decoded.access import Access
from decoded.overlapped_turns import OverlappedTurns
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.block_puller import EagerPuller
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.local import LocalEngine
from shared.kv.pool import LocalPool
from shared.ops.pool_pair import PoolPair
from tests.unit.decoded.samples import CHUNK, EPOCH, STATE, changed
from tests.unit.decoded.world import NUM_BLOCKS, MakeTurns, Prefilld, World, answer_of, ids_of
from tests.unit.shared.daemon.kit import turns, until

if TYPE_CHECKING:
    from decoded.link import LinkSession
    from shared.engine.decoding import DecodeStep

Play = Callable[..., list[Any]]

PROMPT = ids_of(20)
BLOCKS = [5, 3]
NUM_FIRST_STEPS = 5
"""Of an answer of six tokens: the first is prefilld's."""


class SlowDecoder(GraphDecoder):
    """Its steps end when the test says so, and it counts them."""

    def __init__(self, host: ModelHost, pool: LocalPool) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.num_early = self.num_ordinary = 0
        super().__init__(
            host.model,
            PoolPair.of(pool.kv),
            host.layout,
            max_batch=4,
            max_context_len=NUM_BLOCKS * host.layout.block_size,
        )

    def is_done(self) -> bool:
        return self.may_end.is_set() and super().is_done()

    def launch(self, steps: Any) -> None:  # noqa: ANN401 - as a decoder's
        self.num_ordinary += 1
        super().launch(steps)

    def launch_lonely(self, step: DecodeStep, row: int, token_id: int, *, number: int) -> bool:
        is_launched = super().launch_lonely(step, row, token_id, number=number)
        self.num_early += is_launched
        return is_launched


@pytest.fixture
def decoders() -> list[SlowDecoder]:
    """The decoders of the worlds that a test opens."""
    return []


@pytest.fixture
def make_turns(decoders: list[SlowDecoder]) -> MakeTurns:
    def turns_of_a_gpu(
        host: ModelHost, pool: LocalPool, _arena: LocalPool | None
    ) -> OverlappedTurns:
        decoders.append(SlowDecoder(host, pool))
        return OverlappedTurns(decoders[-1], EagerPuller(pool.kv), event_timeout_s=30)

    return turns_of_a_gpu


def announce(prefilld: Prefilld, *, prompt: list[int] = PROMPT) -> int:
    """Compute a prompt and name its blocks as the last ones; return the first token."""
    blocks = BLOCKS[: -(-len(prompt) // 16)]
    first_id = prefilld.compute(prompt, blocks)
    prefilld.page.publish(0, 1)
    first_step = wire.FirstStep(num_tokens=len(prompt), sampling=STATE.sampling)
    total_blocks = 2 if prompt is PROMPT else 3
    prefilld.socket.send(
        changed(CHUNK, blocks=blocks, total_blocks=total_blocks, first_step=first_step)
    )
    return first_id


def tell(prefilld: Prefilld, token_id: int) -> None:
    prefilld.page.tell_first_token(0, 1, token_id)


async def begun(
    world: World, decoder: SlowDecoder, *, prompt: list[int] = PROMPT
) -> tuple[Prefilld, LinkSession]:
    """Return both ends of a link whose lease's early step runs until the test says that it ends."""
    world.start()
    prefilld, session = await world.linked()
    decoder.may_end.clear()
    tell(prefilld, announce(prefilld, prompt=prompt))
    await until(lambda: decoder.num_early == 1)
    return prefilld, session


def expected(host: ModelHost, prompt: list[int] = PROMPT) -> list[int]:
    """Return what one process alone answers, behind the first token."""
    engine = LocalEngine(host.model, num_blocks=16)
    ((_, *rest),) = engine.generate([prompt], max_tokens=6, ignore_eos=True)
    return rest


async def ended(user: Any) -> wire.End:  # noqa: ANN401 - a recorder
    end = await user.until_received(wire.End)
    assert isinstance(end, wire.End)
    return end


def test_a_step_that_is_under_way_when_handoff_comes_is_the_answers_first(
    play: Play, host: ModelHost, decoders: list[SlowDecoder]
) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        prefilld, _ = await begun(world, decoder)
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await prefilld.until_received(wire.Release)
        assert answer_of(user) == []
        decoder.may_end.set()
        assert (await ended(user)).reason == "length"
        assert answer_of(user) == expected(host)
        assert (decoder.num_early, decoder.num_ordinary) == (1, NUM_FIRST_STEPS - 1)
        await world.settled()
        assert prefilld.kinds[2:4] == [wire.Adopt, wire.Release]

    play(scene)


def test_a_step_that_is_over_when_handoff_comes_is_not_taken_again(
    play: Play, host: ModelHost, decoders: list[SlowDecoder]
) -> None:
    """As when the client is slow to take its first token, and HANDOFF waits for it."""

    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.start()
        prefilld, _ = await world.linked()
        tell(prefilld, announce(prefilld))
        await until(lambda: decoder.num_early == 1 and decoder.num_in_flight == 0)
        await turns(3)
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await ended(user)
        assert answer_of(user) == expected(host)
        assert (decoder.num_early, decoder.num_ordinary) == (1, NUM_FIRST_STEPS - 1)
        await world.settled()

    play(scene)


def test_a_token_that_is_never_told_is_not_waited_for(
    play: Play, host: ModelHost, decoders: list[SlowDecoder]
) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.start()
        prefilld, session = await world.linked()
        announce(prefilld)
        await until(lambda: session.intake.held == [1])
        await turns(5)
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await ended(user)
        assert answer_of(user) == expected(host)
        assert (decoder.num_early, decoder.num_ordinary) == (0, NUM_FIRST_STEPS)
        await world.settled()

    play(scene)


@pytest.mark.parametrize("way", ["abort", "lost"])
def test_what_ends_the_lease_waits_for_the_step(
    play: Play, decoders: list[SlowDecoder], way: str
) -> None:
    """The step writes blocks that nobody else may have until it is over."""

    async def scene(world: World) -> None:
        (decoder,) = decoders
        prefilld, session = await begun(world, decoder)
        if way == "abort":
            prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=1))
        else:
            prefilld.socket.close()
            await until(lambda: session.is_lost)
        await turns(5)
        assert not world.is_all_free
        assert wire.Release not in prefilld.kinds
        decoder.may_end.set()
        await world.settled()
        if way == "abort":
            await prefilld.until_received(wire.Release)
        assert session.intake.is_empty

    play(scene)


@pytest.mark.parametrize("num_tokens", [16, 20, 32])
def test_with_direct_access_the_prompt_is_read_where_it_is(
    play: Play, host: ModelHost, decoders: list[SlowDecoder], num_tokens: int
) -> None:
    """Also where nothing is left to copy, since the prompt fills its last block."""

    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.access = Access("direct", "the test says so")
        prompt = ids_of(num_tokens)
        prefilld, _ = await begun(world, decoder, prompt=prompt)
        user = prefilld.hand_over(prompt, BLOCKS[: -(-num_tokens // 16)], total_blocks=3)
        await prefilld.until_received(wire.Adopt)
        assert wire.Release not in prefilld.kinds
        decoder.may_end.set()
        await ended(user)
        assert answer_of(user) == expected(host, prompt)
        assert (decoder.num_early, decoder.num_ordinary) == (1, NUM_FIRST_STEPS - 1)
        await prefilld.until_received(wire.Release)
        await world.settled()

    play(scene)


def test_a_revoked_lease_begins_nothing(play: Play, decoders: list[SlowDecoder]) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.start()
        prefilld, session = await world.linked()
        first_id = announce(prefilld)
        await until(lambda: session.intake.held == [1])
        prefilld.page.publish(0, 2)
        tell(prefilld, first_id)
        prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=1))
        await prefilld.until_received(wire.Release)
        await world.settled()
        assert decoder.num_early == 0

    play(scene)


def test_another_first_token_than_was_told_is_refused(
    play: Play, decoders: list[SlowDecoder]
) -> None:
    """The step's keys and values would be those of another answer."""

    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.start()
        prefilld, _ = await world.linked()
        tell(prefilld, announce(prefilld) + 1)
        await until(lambda: decoder.num_early == 1)
        prefilld.hand_over(PROMPT, BLOCKS)
        reject = await prefilld.until_received(wire.Reject)
        assert isinstance(reject, wire.Reject)
        assert (reject.code, reject.message) == (
            "invalid-message",
            "HANDOFF contradicts the first token told",
        )
        await world.settled()

    play(scene)


def test_beside_running_answers_a_sequence_joins_them_as_ever(
    play: Play, host: ModelHost, decoders: list[SlowDecoder]
) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        world.start()
        prefilld, _ = await world.linked()
        other = prefilld.hand_over(ids_of(5), [1], lease=2, at=1, max_tokens=12)
        await until(lambda: decoder.num_ordinary > 0)
        decoder.may_end.clear()
        await until(lambda: decoder.num_in_flight > 0)
        tell(prefilld, announce(prefilld))
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await prefilld.until_received(wire.Release)
        decoder.may_end.set()
        await ended(user)
        await ended(other)
        assert answer_of(user) == expected(host)
        assert decoder.num_early == 0
        await world.settled()

    play(scene)


def test_what_joins_behind_an_early_step_changes_nothing_for_either(
    play: Play, host: ModelHost, decoders: list[SlowDecoder]
) -> None:
    """Its own sequence has started by the time that the step of the others is launched, or not."""

    async def scene(world: World) -> None:
        (decoder,) = decoders
        prefilld, _ = await begun(world, decoder)
        other = prefilld.hand_over(ids_of(5), [1], lease=2, at=1)
        await until(lambda: decoder.num_ordinary == 1)
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await until(lambda: len(prefilld.of(wire.Adopt)) == 2)
        decoder.may_end.set()
        await ended(user)
        await ended(other)
        assert answer_of(user) == expected(host)
        assert answer_of(other) == expected(host, ids_of(5))
        await world.settled()

    play(scene)


def test_nothing_that_follows_the_last_chunk_frees_what_the_step_writes(
    play: Play, decoders: list[SlowDecoder]
) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        prefilld, _ = await begun(world, decoder)
        again = wire.FirstStep(num_tokens=len(PROMPT), sampling=STATE.sampling)
        prefilld.socket.send(changed(CHUNK, first=2, blocks=[], first_step=again))
        prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=1))
        await turns(5)
        assert not world.is_all_free
        decoder.may_end.set()
        await world.settled()

    play(scene)


def test_a_cancelled_answer_ends_behind_its_early_step(
    play: Play, decoders: list[SlowDecoder]
) -> None:
    async def scene(world: World) -> None:
        (decoder,) = decoders
        prefilld, _ = await begun(world, decoder)
        user = prefilld.hand_over(PROMPT, BLOCKS)
        await prefilld.until_received(wire.Release)
        user.socket.send(wire.Cancel())
        await until(lambda: not world.book.living or world.book.living[0].is_cancelled)
        assert not world.is_all_free
        decoder.may_end.set()
        assert (await ended(user)).reason == "cancelled"
        await world.settled()

    play(scene)
