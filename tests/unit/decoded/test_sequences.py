"""The book of adopted requests: who lives, and how each one ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoded.sequence import Sequence
from protocol import messages as wire
from tests.unit.decoded.samples import HANDOFF, Stream, changed
from tests.unit.decoded.world import World
from tests.unit.shared.daemon.kit import until

Play = Callable[..., list[Any]]


class Case:
    """One adopted sequence in a world's book."""

    def __init__(
        self,
        world: World,
        *,
        number: int = 1,
        is_pulled: bool = True,
        send_buffer_bytes: int | None = None,
    ) -> None:
        self.case = Stream(send_buffer_bytes=send_buffer_bytes)
        self.sequence, _ = Sequence.adopt(
            changed(HANDOFF, id=f"r{number}"),
            stream=self.case.stream,
            token_bytes=lambda _: b"x",
            block_size=16,
            adopted_ns=5,
        )
        self.case.stream._on_closed = lambda: world.book.client_gone(self.sequence)
        if is_pulled:
            self.sequence.settle(world.scheduler.reserve(2) or [], [])
            self.sequence.has_started = True
            world.scheduler.start(self.sequence)
        world.book.add(self.sequence)


def test_an_ended_sequence_gives_its_blocks_back_and_tells_its_client(play: Play) -> None:
    async def scene(world: World) -> None:
        one = Case(world)
        user = one.case.user()
        one.case.stream.activate()
        world.book.end(one.sequence, "stop")
        assert world.book.living == ()
        assert world.is_all_free
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert (end.reason, end.usage.completion_tokens) == ("stop", 1)
        await until(lambda: world.book.is_idle)
        assert world.service.metrics.snapshot()['kvpair_requests_ended_total{reason="stop"}'] == 1

    play(scene)


def test_a_failed_sequence_gives_its_blocks_back_and_may_ask_again(play: Play) -> None:
    async def scene(world: World) -> None:
        one = Case(world)
        user = one.case.user()
        one.case.stream.activate()
        world.book.fail(one.sequence, "prefill-lost", "why")
        assert world.is_all_free
        error = await user.until_received(wire.Error)
        assert error == wire.Error(code="prefill-lost", message="why", retryable=True)

    play(scene)


def test_blocks_that_are_still_the_lease_s_are_not_freed_here(play: Play) -> None:
    """They would be freed twice."""

    async def scene(world: World) -> None:
        one = Case(world, is_pulled=False)
        taken = world.scheduler.reserve(2)
        world.book.end(one.sequence, "cancelled")
        assert world.scheduler.num_reserved == 1
        world.scheduler.unreserve(taken or [])
        one.case.stream.close()

    play(scene)


def test_the_living_are_in_the_order_of_their_adoption(play: Play) -> None:
    async def scene(world: World) -> None:
        cases = [Case(world, number=number) for number in (1, 2, 3)]
        world.book.end(cases[1].sequence, "stop")
        assert [one.sequence for one in (cases[0], cases[2])] == list(world.book.living)
        for one in cases:
            one.case.stream.close()

    play(scene)


def test_a_cancel_only_marks(play: Play) -> None:
    """A running step may still write to the blocks."""

    async def scene(world: World) -> None:
        one = Case(world)
        world.book.cancel(one.sequence)
        assert one.sequence.is_cancelled
        assert world.book.living == (one.sequence,)
        assert world.allocator.counts().active == 2
        one.case.stream.close()

    play(scene)


def test_the_end_of_a_connection_is_a_cancel(play: Play) -> None:
    async def scene(world: World) -> None:
        one = Case(world)
        one.case.stream.activate()
        one.case.theirs.close()
        await until(lambda: one.sequence.is_cancelled)
        world.book.end(one.sequence, "cancelled")
        assert world.book.is_idle
        assert world.service.metrics.snapshot()['kvpair_requests_ended_total{reason="gone"}'] == 1

    play(scene)


def test_the_book_is_not_idle_before_the_last_byte_is_out(play: Play) -> None:
    """A daemon that left earlier would cut the answer's end off."""

    async def scene(world: World) -> None:
        one = Case(world, send_buffer_bytes=4_608)
        one.case.stream.activate()
        one.case.stream.push(one.sequence.push(5))
        one.case.stream._socket.send(wire.Tokens(index=2, ids=[1], text="y" * 100_000))  # type: ignore[union-attr]
        world.book.end(one.sequence, "stop")
        assert world.book.living == ()
        assert not world.book.is_idle
        user = one.case.user()
        await user.until_received(wire.End)
        await until(lambda: world.book.is_idle)

    play(scene)


def test_a_client_that_takes_nothing_is_cut_off_and_others_are_not(play: Play) -> None:
    async def scene(world: World) -> None:
        slow, idle = Case(world, send_buffer_bytes=4_608), Case(world, number=2)
        for one in (slow, idle):
            one.case.stream.activate()
        slow.case.stream._socket.send(wire.Tokens(index=2, ids=[1], text="y" * 100_000))  # type: ignore[union-attr]
        world.book.close_stalled(100)
        world.book.close_stalled(159.9)
        assert not slow.sequence.is_cancelled
        world.book.close_stalled(160)
        assert slow.sequence.is_cancelled
        assert slow.case.stream.is_closed
        assert not idle.sequence.is_cancelled
        idle.case.stream.close()

    logs = play(scene)
    assert [line["timeout_s"] for line in logs if line["event"] == "client.stalled"] == [60]
