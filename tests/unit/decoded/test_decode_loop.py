"""The loop: pulled, decoded, streamed, ended; nothing of one answer shows in another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from tests.unit.decoded.world import (
    MakeTurns,
    World,
    answer_of,
    eager_turns,
    ids_of,
    overlapped_turns,
)
from tests.unit.shared.daemon.kit import turns, until

Play = Callable[..., list[Any]]


@pytest.fixture(params=[eager_turns, overlapped_turns])
def make_turns(request: pytest.FixtureRequest) -> MakeTurns:
    """Every scene is played with both kinds of turns."""
    chosen: MakeTurns = request.param
    return chosen


def expected(host: ModelHost, *prompts: list[int], max_tokens: int = 6) -> list[list[int]]:
    """Return what one process alone answers."""
    engine = LocalEngine(host.model, num_blocks=16)
    answers = engine.generate(list(prompts), max_tokens=max_tokens, ignore_eos=True)
    return [list(answer) for answer in answers]


def test_an_adopted_answer_is_that_of_one_process_alone(play: Play, host: ModelHost) -> None:
    """The pool is full of NaN at first: what was never written is never read."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3])
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        ((first, *rest),) = expected(host, ids_of(20))
        assert answer_of(user) == rest
        assert isinstance(first, int)
        assert (end.reason, end.usage.completion_tokens) == ("length", 6)
        assert end.timings_ms.handoff is not None
        await world.settled()
        assert prefilld.kinds[2:4] == [wire.Adopt, wire.Release]

    play(scene)


def test_answers_of_a_batch_are_those_of_each_alone(play: Play, host: ModelHost) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prompts = [ids_of(5), ids_of(17)[::-1], ids_of(20)]
        users = [
            prefilld.hand_over(
                prompt, [2 * number + 1, 2 * number + 2], lease=number + 1, at=number
            )
            if len(prompt) > 16
            else prefilld.hand_over(prompt, [2 * number + 1], lease=number + 1, at=number)
            for number, prompt in enumerate(prompts)
        ]
        await until(lambda: len(world.book.living) == 3)
        world.start()
        for user, prompt in zip(users, prompts, strict=True):
            await user.until_received(wire.End)
            ((_, *rest),) = expected(host, prompt)
            assert answer_of(user) == rest
        await world.settled()

    play(scene)


def test_an_unstreamed_answer_is_one_frame_with_the_token_that_prefilld_kept(
    play: Play, host: ModelHost
) -> None:
    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3], stream=False, delivered=0)
        await user.until_received(wire.End)
        tokens, _ = user.messages
        assert isinstance(tokens, wire.Tokens)
        ((*whole,),) = expected(host, ids_of(20))
        assert (tokens.index, tokens.ids) == (0, whole)

    play(scene)


def test_room_that_comes_free_is_told(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1])
        await user.until_received(wire.End)
        await prefilld.until_received(wire.CreditUpdate)
        credits = prefilld.messages[-1].credits  # type: ignore[attr-defined]
        assert (credits.free_blocks, credits.free_sequences, credits.seen) == (15, 32, 1)

    play(scene)


def test_a_cancel_in_mid_step_ends_the_answer_after_that_step(play: Play) -> None:
    """The step still writes to the blocks; its token is sampled and is sent."""

    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1], max_tokens=27)
        await prefilld.until_received(wire.Adopt)
        take_turn = world.engine.run

        async def cancelled_meanwhile(function: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the engine's
            result = await take_turn(function, *args, **options)
            if result.step:
                user.socket.send(wire.Cancel())
                await until(lambda: world.book.living[0].is_cancelled)
                assert not world.is_all_free
            return result

        world.engine.run = cancelled_meanwhile  # type: ignore[method-assign]
        world.start()
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert (end.reason, end.usage.completion_tokens) == ("cancelled", 2)
        assert len(answer_of(user)) == 1
        await world.settled()

    play(scene)


def test_a_cancel_before_the_blocks_are_pulled_gives_the_lease_back(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        user.socket.send(wire.Cancel())
        await until(lambda: world.book.living[0].is_cancelled)
        assert session.intake.held == [1]
        world.start()
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert (end.reason, answer_of(user)) == ("cancelled", [])
        await prefilld.until_received(wire.Release)
        await world.settled()

    play(scene)


def test_a_client_that_vanishes_frees_its_blocks(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        user.socket.close()
        await until(lambda: world.book.living[0].stream.is_closed)
        world.start()
        await world.settled()
        assert world.service.metrics.snapshot()['kvpair_requests_ended_total{reason="gone"}'] == 1

    play(scene)


def test_blocks_revoked_under_the_copy_end_the_request_and_nothing_was_made_of_them(
    play: Play,
) -> None:
    """The generation is looked at again after the copy: what was read may be anything."""

    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        copy_turn = world.engine.run

        async def revoke_meanwhile(function: Any, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - as the engine's
            result = await copy_turn(function, *args, **options)
            if prefilld.page.read(0) == 1:
                prefilld.page.publish(0, 2)
            return result

        world.engine.run = revoke_meanwhile  # type: ignore[method-assign]
        user = prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        world.start()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert (error.code, error.retryable) == ("prefill-lost", True)
        assert answer_of(user) == []
        assert world.service.metrics.snapshot()["kvpair_copies_voided_total"] == 1
        await world.settled()

    play(scene)


def test_blocks_revoked_before_the_copy_are_not_copied_at_all(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        prefilld.page.publish(0, 2)
        world.start()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert error.code == "prefill-lost"
        assert world.service.metrics.snapshot()["kvpair_pulled_bytes_total"] == 0
        await world.settled()

    play(scene)


def test_a_new_answer_joins_a_running_batch(
    play: Play, host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies beside a step are bounded, so the first stream goes on meanwhile."""
    monkeypatch.setattr("decoded.decode_loop.BUSY_COPY_BYTES", 1)

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        first = prefilld.hand_over(ids_of(4), [1], max_tokens=28)
        await until(lambda: answer_of(first))
        second = prefilld.hand_over(ids_of(20), [3, 5], lease=2, at=1)
        for user, prompt, num_tokens in ((first, ids_of(4), 28), (second, ids_of(20), 6)):
            await user.until_received(wire.End)
            ((_, *rest),) = expected(host, prompt, max_tokens=num_tokens)
            assert answer_of(user) == rest
        await world.settled()

    play(scene)


def test_without_work_the_loop_rests(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        await turns()
        assert world.engine.num_submitted == 0
        world.loop.wake()
        await turns()
        assert world.engine.num_submitted == 0

    play(scene)
