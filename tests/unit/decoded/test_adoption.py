"""What comes over links: understood, answered, and copied in time."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from protocol import messages as wire
from tests.support.descriptors import num_descriptors
from tests.unit.decoded.samples import CHUNK, EPOCH, changed
from tests.unit.decoded.world import World, ids_of
from tests.unit.shared.daemon.kit import until

Play = Callable[..., list[Any]]


def test_an_adopt_tells_the_room_that_is_left(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        prefilld.hand_over(ids_of(20), [1, 2])
        adopt = await prefilld.until_received(wire.Adopt)
        assert adopt == wire.Adopt(
            epoch=EPOCH,
            lease=1,
            credits=wire.Credits(free_blocks=12, free_sequences=31, queue_depth=1, seen=1),
        )
        assert session.intake.held == [1]
        assert world.desk.links.held_leases(EPOCH, world.desk.in_place) == [1]
        assert world.desk.links.held_leases(bytes(16), world.desk.in_place) == []

    play(scene)


def test_without_room_a_handoff_is_rejected_and_its_descriptor_closed(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        num_open = num_descriptors()
        user = prefilld.hand_over(ids_of(5), [1], total_blocks=16)
        reject = await prefilld.until_received(wire.Reject)
        assert isinstance(reject, wire.Reject)
        assert (reject.lease, reject.code) == (1, "no-room")
        assert reject.message == "no room for a sequence of 16 blocks"
        assert reject.credits.seen == 1
        await user.until(lambda: user.closed)  # nobody holds it any more
        assert num_descriptors() == num_open
        assert world.book.is_idle
        series = 'kvpair_handoffs_rejected_total{code="no-room"}'
        assert world.service.metrics.snapshot()[series] == 1
        await world.settled()

    play(scene)


def test_the_batch_s_places_are_room_too(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.hand_over(ids_of(5), [1])
        prefilld.hand_over(ids_of(5), [2], lease=2, at=1)
        await prefilld.until_received(wire.Reject)
        assert len(prefilld.of(wire.Adopt)) == 1

    play(scene, decoded__max_batch=1)


def test_chunks_are_pulled_ahead_and_the_handoff_only_adds_the_rest(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        prompt = ids_of(20)
        prefilld.compute(prompt, [5, 3])
        prefilld.page.publish(0, 1)
        prefilld.socket.send(changed(CHUNK, blocks=[5]))
        block_bytes = world.host.layout.block_bytes
        pulled = world.service.metrics.snapshot
        await until(lambda: pulled()["kvpair_pulled_bytes_total"] == block_bytes)
        user = prefilld.hand_over(prompt, [5, 3])
        await user.until_received(wire.End)
        assert pulled()["kvpair_pulled_bytes_total"] == 2 * block_bytes
        await world.settled()

    play(scene)


def test_a_chunk_without_room_is_declined(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.page.publish(0, 1)
        prefilld.socket.send(changed(CHUNK, total_blocks=16))
        nochunk = await prefilld.until_received(wire.NoChunk)
        assert isinstance(nochunk, wire.NoChunk)
        assert (nochunk.lease, nochunk.credits.seen) == (1, 1)

    play(scene)


def test_an_aborted_reservation_is_released_and_free(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.page.publish(0, 1)
        prefilld.socket.send(CHUNK)
        prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=1))
        release = await prefilld.until_received(wire.Release)
        assert isinstance(release, wire.Release)
        assert release.lease == 1
        await world.settled()

    play(scene)


def test_a_late_abort_is_counted_and_changes_nothing(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.hand_over(ids_of(5), [1])
        prefilld.socket.send(wire.Abort(epoch=EPOCH, lease=1))
        series = 'kvpair_lease_messages_ignored_total{kind="abort"}'
        await until(lambda: world.service.metrics.snapshot().get(series) == 1)
        assert len(world.book.living) == 1

    play(scene)


def test_a_handoff_without_its_descriptor_is_rejected(play: Play) -> None:
    """The request stays prefilld's; it has the connection and can hand it over again."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        take = session.on_message

        def lose_it(message: wire.Message, fds: list[int] | None) -> None:
            for fd in fds or ():
                os.close(fd)
            take(message, None if isinstance(message, wire.Handoff) else fds)

        session.on_message = lose_it  # type: ignore[method-assign]
        prefilld.hand_over(ids_of(5), [1])
        reject = await prefilld.until_received(wire.Reject)
        assert isinstance(reject, wire.Reject)
        assert reject.code == "fd-lost"
        await world.settled()

    play(scene)


# --- the link's end --------------------------------------------------------------------------


def test_an_adopted_answer_outlives_its_prefilld(play: Play) -> None:
    """The mapping does, so what was handed over can still be pulled."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        user = prefilld.hand_over(ids_of(20), [1, 2])
        await prefilld.until_received(wire.Adopt)
        prefilld.socket.close()
        await until(lambda: session.is_lost)
        assert not session.close_mapping()
        world.start()
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert end.reason == "length"
        await world.settled()
        await until(lambda: world.tick() or not world.desk.links.sessions)

    play(scene)


def test_what_was_only_reserved_is_dropped_with_the_link(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.page.publish(0, 1)
        prefilld.socket.send(CHUNK)
        await until(lambda: world.scheduler.num_reserved)
        prefilld.socket.close()
        await world.settled()

    play(scene)
