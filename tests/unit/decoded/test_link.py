"""One link as decoded sees it, against a prefilld at the other end of a real socket."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import pytest
import torch

from decoded.access import Access
from protocol import messages as wire
from tests.support.descriptors import num_descriptors
from tests.unit.decoded.samples import CHUNK, EPOCH
from tests.unit.decoded.world import World, ids_of
from tests.unit.shared.daemon.kit import is_closed, turns, until

Play = Callable[..., list[Any]]


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs]


def test_a_link_is_welcomed_mapped_and_proved(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        welcome, mapped = prefilld.messages[:2]
        assert isinstance(welcome, wire.Welcome)
        assert isinstance(mapped, wire.Mapped)
        assert (welcome.access, welcome.held, welcome.pool_blocks) == ("pull", [], 15)
        assert welcome.credits == mapped.credits
        assert mapped.credits == wire.Credits(
            free_blocks=15, free_sequences=32, queue_depth=0, seen=0
        )
        assert session.is_open
        status = session.status()
        assert (status["state"], status["peer_pid"], status["access"]) == (
            "open",
            os.getpid(),
            "pull",
        )

    assert "link.opened" in events(play(scene))


def test_the_pool_s_descriptors_are_closed_once_it_is_mapped(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        received: list[int] = []
        take = world.sessions[0].on_message

        def note(message: wire.Message, fds: list[int] | None) -> None:
            received.extend(fds or ())
            take(message, fds)

        world.sessions[0].on_message = note  # type: ignore[method-assign]
        prefilld.map()
        await prefilld.until_received(wire.Mapped)
        assert len(received) == 2
        assert all(is_closed(fd) for fd in received)

    play(scene)


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"pool_bytes": 1 << 22}, "size", "announced with 4194304 bytes"),
        ({"control_slots": 9}, "size", "the control page"),
        ({"num_blocks": 1}, "size", "num_blocks"),
    ],
)
def test_a_pool_that_cannot_be_mapped_is_refused_with_its_fault(
    play: Play, changes: dict[str, Any], code: str, said: str
) -> None:
    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        before = num_descriptors()
        prefilld.map(**changes)
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert refuse.code == code
        assert said in refuse.ours
        await prefilld.until(lambda: prefilld.closed)
        assert num_descriptors() <= before
        await until(lambda: world.sessions[0].is_lost)
        world.desk.tick()
        assert world.desk.links.sessions == ()

    play(scene)


@pytest.mark.parametrize("way", ["pull", "direct"])
def test_a_link_that_a_full_gpu_refuses_opens_once_there_is_room(
    play: Play, monkeypatch: pytest.MonkeyPatch, way: Literal["pull", "direct"]
) -> None:
    """Neither the proof nor the engine finds memory at first; the daemon and its engine live on."""

    def full(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    async def scene(world: World) -> None:
        world.access = Access(way=way, because="the test says so")
        with monkeypatch.context() as patch:
            if way == "pull":
                patch.setattr("numpy.copyto", full)
            else:
                patch.setattr(world.turns, "set_peer", full)
            prefilld = world.knock()
            prefilld.hello()
            await prefilld.until_received(wire.Welcome)
            prefilld.map()
            refuse = await prefilld.until_received(wire.Refuse)
            assert isinstance(refuse, wire.Refuse)
            assert refuse.code == "memory"
            assert "the GPU's memory is full" in refuse.ours
            await until(world.sessions[0].close_mapping)
            world.desk.tick()
        await world.linked()
        assert world.sessions[-1].is_open

    play(scene)


def test_a_mapping_that_is_too_slow_is_refused_with_both_rates(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        prefilld.map()
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert (refuse.code, refuse.field) == ("slow-link", "bandwidth_gb_s")
        assert "at least 50000" in refuse.ours
        assert not world.sessions[0].is_open
        await until(world.sessions[0].close_mapping)

    play(scene, link__min_bandwidth_gb_s=50_000)


def test_a_map_whose_descriptors_were_lost_is_refused(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        take = world.sessions[0].on_message

        def lose_them(message: wire.Message, fds: list[int] | None) -> None:
            for fd in fds or ():
                os.close(fd)
            take(message, None)

        world.sessions[0].on_message = lose_them  # type: ignore[method-assign]
        prefilld.map()
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert refuse.code == "fd-lost"

    play(scene)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"slot": 9}, "slot 9 is not on a control page of 8"),
        ({"blocks": [16]}, "block 16 is not in a pool of 16 blocks"),
        ({"total_blocks": 0}, "1 blocks are named of 0 in all"),
    ],
)
def test_a_handoff_that_contradicts_itself_ends_the_link_and_closes_its_descriptor(
    play: Play, changes: dict[str, Any], fault: str
) -> None:
    """Blocks outside the pool would be read outside the mapping."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        user = prefilld.hand_over(ids_of(5), [1], **changes)
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert refuse.code == "invalid-message"
        assert fault in refuse.theirs
        await user.until(lambda: user.closed)
        await until(lambda: session.is_lost)
        assert world.is_all_free
        assert world.book.is_idle

    play(scene)


def test_a_chunk_that_contradicts_the_pool_ends_the_link(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.socket.send(CHUNK)  # fine
        prefilld.socket.send(wire.Chunk(**{**as_fields(CHUNK), "blocks": [99], "first": 1}))
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert "block 99" in refuse.theirs
        await until(lambda: world.is_all_free)

    play(scene)


def as_fields(message: wire.Message) -> dict[str, Any]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_ping_is_answered_with_the_room(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, _ = await world.linked()
        prefilld.socket.send(wire.Ping(sent_ns=77))
        pong = await prefilld.until_received(wire.Pong)
        assert isinstance(pong, wire.Pong)
        assert pong.sent_ns == 77
        assert pong.credits is not None
        assert pong.credits.free_blocks == 15

    play(scene)


def test_room_is_told_only_when_there_is_more_than_was_told(play: Play) -> None:
    """Every answer tells it, so a frame of its own is rarely due."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        session.tell_credits()
        blocks = world.scheduler.reserve(3)
        session.tell_credits()
        prefilld.socket.send(wire.Ping(sent_ns=1))
        await prefilld.until_received(wire.Pong)
        assert prefilld.of(wire.CreditUpdate) == []
        world.scheduler.unreserve(blocks or [])
        session.tell_credits()
        session.tell_credits()
        await prefilld.until_received(wire.CreditUpdate)
        await turns()
        assert len(prefilld.of(wire.CreditUpdate)) == 1

    play(scene)


def test_no_room_is_told_before_the_link_is_open(play: Play) -> None:
    """CREDIT is illegal there."""

    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        world.sessions[0].tell_credits()
        world.sessions[0].tick()
        await turns()
        assert prefilld.kinds == [wire.Welcome]

    play(scene)


def test_silence_is_asked_about_and_then_ends_the_link(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        world.service.clock.advance(1)
        session.tick()
        await prefilld.until_received(wire.Ping)
        world.service.clock.advance(8.9)
        session.tick()
        assert session.is_open
        world.service.clock.advance(0.1)
        session.tick()
        assert session.is_lost

    logs = play(scene)
    assert "link.silent" in events(logs)
    assert "link.lost" in events(logs)


def test_any_message_is_a_sign_of_life(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        world.service.clock.advance(9)
        prefilld.socket.send(wire.Pong(sent_ns=1))
        await until(lambda: session.status()["rtt_us"])
        world.service.clock.advance(9)
        session.tick()
        assert session.is_open

    play(scene)


def test_a_prefilld_that_says_bye_is_no_fault(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        prefilld.socket.send(wire.Bye())
        prefilld.socket.close_when_flushed()
        await until(lambda: session.is_lost)

    logs = play(scene)
    assert "link.closed" in events(logs)
    assert "link.lost" not in events(logs)


def test_leaving_says_bye(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        session.leave()
        await prefilld.until_received(wire.Bye)
        assert session.is_lost
        session.leave()

    play(scene)


def test_giving_way_reads_what_was_sent_before(play: Play) -> None:
    """A prefilld that died may have handed something over first."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        prefilld.hand_over(ids_of(5), [1])
        session.give_way()
        assert session.is_lost
        assert session.intake.seen == 1
        assert world.book.living[0].stream.is_active, "ADOPT is with the kernel"

    play(scene)


def test_a_mapping_is_closed_only_once_nothing_of_it_will_be_read(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        assert not session.close_mapping(), "the link lives"
        prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        session.leave()
        assert not session.close_mapping(), "a block is still to be pulled"
        world.start()
        await world.settled()
        await until(session.close_mapping)

    play(scene)


# --- what the wire allows and the daemon does not survive ------------------------------------


def failures_of(world: World) -> list[BaseException]:
    failures = world.service.failures[:]
    world.service.failures.clear()
    return failures


def test_a_prefilld_that_leaves_while_it_is_mapped_harms_nobody(play: Play) -> None:
    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        prefilld.map()
        prefilld.socket.send(wire.Bye())
        await until(lambda: world.engine.num_finished == 1)
        await turns()
        assert failures_of(world) == []

    play(scene)


def test_a_prefilld_that_said_bye_is_not_asked_whether_it_lives(play: Play) -> None:
    """Its end of the stream is a turn of the loop away."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        prefilld.socket.send(wire.Bye())
        await turns()
        world.service.clock.advance(1)
        session.tick()

    play(scene)


def test_a_map_of_another_backend_is_refused(play: Play) -> None:
    """HELLO said memfd; whatever it says afterwards must not end the daemon."""

    async def scene(world: World) -> None:
        prefilld = world.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        pool = prefilld.pool.export()
        prefilld.socket.send(
            wire.Map(
                pool_bytes=prefilld.pool.layout.pool_bytes,
                offset=0,
                num_blocks=16,
                control_slots=8,
                proof_bytes=64,
                pool_handle=b"h" * 64,
            ),
            (pool,),
        )
        os.close(pool)
        await until(lambda: world.service.failures or prefilld.of(wire.Refuse))
        assert failures_of(world) == []

    play(scene)


def test_a_message_of_another_epoch_ends_the_link(play: Play) -> None:
    """Its block ids mean nothing here."""

    async def scene(world: World) -> None:
        prefilld, session = await world.linked()
        frame = wire.Abort(epoch=bytes(16), lease=1)
        from protocol.codec import encode_message

        prefilld.raw.send(encode_message(frame))
        refuse = await prefilld.until_received(wire.Refuse)
        assert isinstance(refuse, wire.Refuse)
        assert refuse.code == "stale-epoch"
        assert EPOCH.hex() in refuse.theirs
        await until(lambda: session.is_lost)

    play(scene)
