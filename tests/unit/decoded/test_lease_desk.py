"""A client's connection is decoded's once the kernel has the whole ADOPT, and not before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from protocol import messages as wire
from tests.unit.decoded.world import World, answer_of, ids_of
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import turns, until

Play = Callable[..., list[Any]]


def stop_reading(end: Recorder) -> None:
    asyncio.get_running_loop().remove_reader(end.raw)


def read_on(end: Recorder) -> None:
    asyncio.get_running_loop().add_reader(end.raw, end.socket._on_readable)


def test_no_byte_reaches_a_client_before_adopt_is_with_the_kernel(play: Play) -> None:
    """Prefilld does not read: ADOPT waits here, and so does everything for the client."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked(send_buffer_bytes=4_608)
        stop_reading(prefilld)
        while session._socket.is_flushed:
            session.send(wire.Ping(sent_ns=1))
        user = prefilld.hand_over(ids_of(5), [1])
        world.start()
        await until(lambda: world.scheduler.num_running)
        await until(lambda: world.book.living == ())  # decoded to its end
        await turns()
        assert user.messages == []
        read_on(prefilld)
        await user.until_received(wire.End)
        assert prefilld.of(wire.Adopt)
        assert len(answer_of(user)) == 5
        await world.settled()

    play(scene)


async def adopt_in_the_queue(world: World) -> tuple[Recorder, Recorder]:
    """Return prefilld, which does not read, and the user whose ADOPT waits for it."""
    prefilld, session = await world.linked(send_buffer_bytes=4_608)
    stop_reading(prefilld)
    while session._socket.is_flushed:
        session.send(wire.Ping(sent_ns=1))
    user = prefilld.hand_over(ids_of(5), [1])
    await until(lambda: world.book.living)
    return prefilld, user


def test_a_stream_whose_adopt_never_left_is_not_ours(play: Play) -> None:
    """Prefilld takes the connection back and hands it to the next decoded."""

    async def scene(world: World) -> None:
        prefilld, user = await adopt_in_the_queue(world)
        prefilld.socket.close()
        await user.until(lambda: user.closed)  # nobody holds it in this test
        assert user.messages == []
        world.start()
        await world.settled()

    play(scene)


def test_a_stream_whose_adopt_never_left_is_not_ours_also_when_its_blocks_are_here(
    play: Play,
) -> None:
    """Else its descriptor is held, and the drain waits, until the daemon ends."""

    async def scene(world: World) -> None:
        prefilld, user = await adopt_in_the_queue(world)
        world.start()
        await until(lambda: world.scheduler.num_running or not world.book.living)
        prefilld.socket.close()
        await until(lambda: world.sessions[0].is_lost and not world.book.living)
        await turns(500)
        assert user.closed
        assert world.book.is_idle

    play(scene)
