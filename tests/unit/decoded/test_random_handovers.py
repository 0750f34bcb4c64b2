"""Random hand-overs into pools that are too small: early steps, ends of every kind, a lost link.

Steps end when chance says so, on the code that a GPU runs.  Blocks that came back are poisoned.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from decoded.access import Access
from decoded.in_place import MOVE_S
from decoded.overlapped_turns import ArenaPath, OverlappedTurns
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.block_puller import EagerPuller
from shared.engine.local import LocalEngine
from shared.engine.run_copies import RunCopies
from shared.kv.pool import LocalPool
from shared.ops.sampling import SamplingParams
from tests.unit.decoded.samples import CHUNK, EPOCH, changed
from tests.unit.decoded.test_early_step import SlowDecoder
from tests.unit.decoded.world import (
    NUM_SLOTS,
    MakeTurns,
    Prefilld,
    World,
    answer_of,
    ids_of,
)
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import turns, until

Play = Callable[..., list[Any]]

NUM_SEEDS = 6
BLOCK_SIZE = 16
PROMPTS = (1, 5, 15, 16, 17, 31, 32, 33, 48, 60)
"""Tokens of a prompt: about the edges of blocks."""
ANSWERS = ((2, 3, 6, 20), (40, 90, 120, 150))
"""Tokens of an answer: so short that decoded is idle between them, or so long that they do not fit
the pool together."""


class Announcing:
    """One prefilld and its books: slots, generations, blocks."""

    def __init__(self, prefilld: Prefilld, chance: random.Random, *, is_direct: bool) -> None:
        self.prefilld, self.chance, self.is_direct = prefilld, chance, is_direct
        self.lease_ids = count(1)
        self.slots, self.blocks = list(range(NUM_SLOTS)), list(range(1, 16))

    @property
    def is_lost(self) -> bool:
        return not self.prefilld.socket.is_open

    async def until(self, is_there: Callable[[], object]) -> bool:
        """Wait for something, or for the link's end; return whether it is there."""
        await until(lambda: is_there() or self.is_lost)
        return bool(is_there())

    def turn(self, slot: int) -> int:
        """Publish the next generation of a slot, and return it."""
        generation = self.prefilld.page.read(slot) + 1
        self.prefilld.page.publish(slot, generation)
        return generation

    def answer_to(self, lease: int, *kinds: type[wire.Message]) -> wire.Message | None:
        return next(
            (each for kind in kinds for each in self.prefilld.of(kind) if each.lease == lease), None
        )

    async def verdict(self, lease: int) -> wire.Message | None:
        """Return ADOPT or REJECT; None where the link ended before."""
        await self.until(lambda: self.answer_to(lease, wire.Adopt, wire.Reject))
        return self.answer_to(lease, wire.Adopt, wire.Reject)

    async def give_back(self, lease: int, slot: int, blocks: list[int]) -> None:
        """Wait for RELEASE; afterwards nobody may find the prompt where it was."""
        if await self.until(lambda: self.answer_to(lease, wire.Release)):
            self.turn(slot)
            self.slots.append(slot)
            self.prefilld.pool.kv[blocks] = float("nan")
            self.blocks += blocks


async def serve(host: ModelHost, books: Announcing, number: int, max_tokens: int) -> None:
    """Compute a prompt, hand it over as chance has it, and hold what comes against one process."""
    chance, prefilld = books.chance, books.prefilld
    prompt = ids_of(chance.choice(PROMPTS) + number)[number:]
    num_blocks = -(-len(prompt) // BLOCK_SIZE)
    total_blocks = len(prompt) // BLOCK_SIZE + 1
    sampling = wire.Sampling(temperature=chance.choice([0, 1.3]), seed=chance.randrange(3))
    params = SamplingParams(temperature=sampling.temperature, seed=sampling.seed)
    engine = LocalEngine(host.model, num_blocks=16)
    (answer,) = engine.generate([prompt], max_tokens=max_tokens, ignore_eos=True, sampling=params)
    if not await books.until(lambda: len(books.blocks) >= num_blocks):
        return
    blocks = [books.blocks.pop() for _ in range(num_blocks)]
    prefilld.compute(prompt, blocks)
    user: Recorder | None = None
    while user is None:  # until there is room
        if not await books.until(lambda: books.slots):
            return
        lease, slot = next(books.lease_ids), books.slots.pop()
        generation = books.turn(slot)
        if chance.random() < 0.7:
            step = wire.FirstStep(num_tokens=len(prompt), sampling=sampling)
            prefilld.socket.send(
                changed(
                    CHUNK,
                    lease=lease,
                    slot=slot,
                    generation=generation,
                    blocks=blocks,
                    total_blocks=total_blocks,
                    first_step=step,
                )
            )
            await turns(chance.randrange(8))
            if chance.random() < 0.9:
                prefilld.page.tell_first_token(slot, generation, answer[0])
            await turns(chance.randrange(12))
            if chance.random() < 0.15:
                if chance.random() < 0.5:
                    books.turn(slot)
                prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=lease))
                await books.give_back(lease, slot, blocks)
                return
        if books.is_lost:
            return
        user = prefilld.hand_over(
            prompt,
            blocks,
            lease=lease,
            at=slot,
            total_blocks=total_blocks,
            ids=[answer[0]],
            max_tokens=max_tokens,
            sampling=sampling,
        )
        verdict = await books.verdict(lease)
        if verdict is None:
            return
        if isinstance(verdict, wire.Reject):
            user = None
            books.turn(slot)
            books.slots.append(slot)
            await turns(5 + chance.randrange(30))
    giving_back = asyncio.ensure_future(books.give_back(lease, slot, blocks))
    if chance.random() < 0.15:
        await turns(chance.randrange(40))
        user.socket.send(wire.Cancel())
    await until(lambda: _last(user) is not None)
    last, given = _last(user), [answer[0], *answer_of(user)]
    assert given == answer[: len(given)]
    if isinstance(last, wire.End):
        assert last.reason == "cancelled" or given == answer
    else:
        assert isinstance(last, wire.Error)
        may_be_lost = books.is_direct and books.is_lost
        assert last.code == "preempted" or (last.code == "prefill-lost" and may_be_lost)
    await giving_back


def _last(user: Recorder) -> wire.Message | None:
    return next((each for each in user.messages if isinstance(each, wire.End | wire.Error)), None)


@pytest.fixture
def decoders() -> list[SlowDecoder]:
    """The decoders of the worlds that a test opens."""
    return []


@pytest.fixture
def make_turns(decoders: list[SlowDecoder]) -> MakeTurns:
    def turns_of_a_gpu(host: ModelHost, pool: LocalPool, arena: LocalPool) -> OverlappedTurns:
        decoders.append(SlowDecoder(host, pool))
        path = ArenaPath(
            pool=pool.kv,
            arena=arena.kv,
            out=RunCopies(arena.kv, pool.kv.device),
            back=RunCopies(pool.kv, pool.kv.device),
        )
        return OverlappedTurns(
            decoders[-1], EagerPuller(pool.kv), event_timeout_s=30, arena_path=path
        )

    return turns_of_a_gpu


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_every_token_is_right_and_nothing_is_left(
    play: Play, host: ModelHost, decoders: list[SlowDecoder], seed: int
) -> None:
    chance = random.Random(seed)
    lengths = ANSWERS[seed % 2]

    async def scene(world: World) -> None:
        (decoder,) = decoders
        is_direct = seed // 2 % 2 == 1
        world.access = Access("direct" if is_direct else "pull", "the test says so")
        world.start()
        prefilld, session = await world.linked()
        books = Announcing(prefilld, chance, is_direct=is_direct)

        async def later(number: int) -> None:
            await turns(chance.randrange(100))
            await serve(host, books, number, chance.choice(lengths))

        async def let_steps_end() -> None:
            while True:
                await turns(chance.randrange(1, 15))
                (decoder.may_end.set if chance.random() < 0.5 else decoder.may_end.clear)()
                world.tick()

        async def lose_the_link() -> None:
            await turns(chance.randrange(300))
            prefilld.socket.close()
            await until(lambda: session.is_lost)
            await turns(60)
            world.service.clock.advance(MOVE_S)

        beside = [asyncio.ensure_future(let_steps_end())]
        if chance.random() < 0.4:
            beside.append(asyncio.ensure_future(lose_the_link()))
        try:
            await asyncio.gather(*(later(number) for number in range(6)))
        finally:
            for task in beside:
                task.cancel()
            decoder.may_end.set()
        await until(lambda: world.tick() or not (session.is_lost and session.is_mapped))
        await world.settled()

    play(scene, decoded__swap_gib=chance.choice([0, 1]), decoded__max_batch=4)
