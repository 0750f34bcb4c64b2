"""prefilld's end of the link, against a scripted decoded at a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from structlog.testing import capture_logs

from decoded.mapping import PeerPool
from prefilld.casualties import Casualties
from prefilld.handoff import HandoffDesk
from prefilld.handshake import Exported
from prefilld.link import PrefillLink
from prefilld.metrics import PrefillMetrics
from prefilld.request import RequestState
from protocol import messages as wire
from protocol.acceptor import Acceptor
from protocol.listener import listen_unix
from protocol.states import Role
from shared.daemon.devices import CPU_DEVICE
from shared.daemon.instance import this_instance
from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.control_page import ControlPage
from shared.kv.holds import BlockHolds
from shared.kv.leases import LeaseTable
from shared.kv.memfd import MemfdPool
from tests.unit.prefilld.recorders import EPOCH, Owner, new_request, streaming_client
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import RecordingService, owned, run, turns, until

POOL_BLOCKS = 31


def credits(seen: int = 0, *, blocks: int = 30) -> wire.Credits:
    return wire.Credits(free_blocks=blocks, free_sequences=4, queue_depth=0, seen=seen)


class Decoded(Recorder):
    """A decoded that answers the hand-shake by itself, as far as it is told to."""

    def __init__(self, sock: socket.socket, host: ModelHost) -> None:
        super().__init__(sock, Role.DECODED_CLIENT)
        self._host = host
        self.held: list[int] = []
        self.answers = True
        self.behind_mapped: list[wire.Message] = []
        self.ends_behind_mapped = False
        self.react = self._react

    def _react(self, message: wire.Message) -> None:
        if not self.answers:
            return
        if isinstance(message, wire.Hello):
            self.socket.send(
                wire.Welcome(
                    instance=this_instance(),
                    access="pull",
                    held=self.held,
                    pool_blocks=POOL_BLOCKS,
                    credits=credits(),
                )
            )
        elif isinstance(message, wire.Map):
            fds = self.fds[-1] or []
            pool = PeerPool(message, fds, self._host.layout, CPU_DEVICE)
            frames = self.socket.connection.send(
                wire.Mapped(digest=pool.digest, bandwidth_gb_s=2.5, credits=credits())
            )
            for message_behind in self.behind_mapped:
                frames += self.socket.connection.send(message_behind)
            with suppress(BrokenPipeError):  # the scene may be over, and its link connects again
                self.raw.send(frames)  # in one piece, so that it is read in one piece
            assert pool.close()
            if self.ends_behind_mapped:
                self.socket.close()

    def close_fds(self) -> None:
        for fds in self.fds:
            for fd in fds or ():
                os.close(fd)
        self.fds.clear()


class World:
    """A link, its desk, and a listener that answers as decoded does."""

    def __init__(self, service: RecordingService, host: ModelHost) -> None:
        self.service, self.host = service, host
        self.engine = EngineThread(num_threads=1)
        self.page = ControlPage.create(8)
        self.allocator = BlockAllocator(host.layout.num_blocks)
        self.holds = BlockHolds(self.allocator, block_size=host.layout.block_size)
        metrics = PrefillMetrics(service.metrics)
        self.desk = HandoffDesk(
            epoch=EPOCH,
            block_size=host.layout.block_size,
            leases=LeaseTable(8),
            holds=self.holds,
            control_page=self.page,
            clock=service.clock,
            log=service.log,
            metrics=metrics,
        )
        self.owner = Owner(self.desk)
        self.desk.attach(self.owner)
        self.num_changes = 0
        self.casualties = Casualties()
        self.link = PrefillLink(
            service=service,
            exported=Exported(
                pool=MemfdPool.create(host.layout),
                device=CPU_DEVICE,
                control_page=self.page,
                epoch=EPOCH,
                instance=this_instance(),
                host=host,
                engine=self.engine,
            ),
            desk=self.desk,
            casualties=self.casualties,
            metrics=metrics,
            on_change=self._on_change,
        )
        self.decodeds: list[Decoded] = []
        self.prepare: Callable[[Decoded], None] = lambda _: None

    def _on_change(self) -> None:
        self.num_changes += 1

    def on_connection(self, sock: socket.socket) -> None:
        decoded = Decoded(owned(sock), self.host)
        self.prepare(decoded)
        self.decodeds.append(decoded)
        decoded.start()

    @property
    def decoded(self) -> Decoded:
        return self.decodeds[-1]

    async def opened(self) -> Decoded:
        await until(lambda: self.link.is_open)
        await self.decoded.until_received(wire.Ping)
        return self.decoded

    async def adopted(self) -> int:
        """Hand a request over and have it adopted; return its lease."""
        client, _ = await streaming_client()
        request = new_request(client, start_blocks=3)
        request.prompt = request.prompt
        request.hold = self.holds.take(request.num_tokens)
        request.state = RequestState.RUNNING
        request.answer_ids.append(7)
        self.desk.ready(request)
        self.desk.pump()
        message = await self.decoded.until_received(wire.Handoff)
        assert isinstance(message, wire.Handoff)
        lease_id = message.lease
        self.decoded.socket.send(wire.Adopt(epoch=EPOCH, lease=lease_id, credits=credits(seen=1)))
        await until(lambda: self.owner.adopted_ids)
        return lease_id


@asynccontextmanager
async def linked(service: RecordingService, host: ModelHost) -> AsyncIterator[World]:
    world = World(service, host)
    listener = listen_unix(service.config.decoded.socket)
    acceptor = Acceptor(listener.socket, world.on_connection, loop=asyncio.get_running_loop())
    service.spawn(world.link.keep(), name="link")
    try:
        yield world
    finally:
        world.link.close()
        await service.end()
        acceptor.stop()
        listener.close()
        for decoded in world.decodeds:
            decoded.socket.close()
            decoded.close_fds()
        await world.engine.stop()
        world.page.close()


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs]


def play(scene: Coroutine[Any, Any, None]) -> None:
    run(scene)


def test_decodeds_word_on_how_it_reads_goes_before_the_configuration(
    make_service: Callable[..., RecordingService], host: ModelHost
) -> None:
    """Which is all that is known before there was a link."""

    async def scene() -> None:
        async with linked(make_service(pool__access="direct"), host) as world:
            assert world.link.is_direct
            await world.opened()  # it pulls
            assert not world.link.is_direct

    play(scene())


def test_a_proved_link_is_open_and_tells_of_its_peer(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            assert world.link.peer_pool_blocks is None
            assert world.link.status()["state"] == "connecting"
            decoded = await world.opened()
            assert world.link.peer_pool_blocks == POOL_BLOCKS
            service.clock.advance(0.000_25)
            (ping,) = [m for m in decoded.messages if isinstance(m, wire.Ping)]
            decoded.socket.send(wire.Pong(sent_ns=ping.sent_ns, credits=credits()))
            await until(lambda: world.link.status()["rtt_us"])
            assert world.link.status() == {
                "state": "open",
                "peer_pid": os.getpid(),
                "access": "pull",
                "bandwidth_gb_s": 2.5,
                "rtt_us": 250.0,
            }
            assert world.num_changes == 1
            assert "link.opened" in events(logs)

    play(scene())


def test_a_refused_link_is_told_once_and_tried_again(
    service: RecordingService, host: ModelHost, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault may be mended at decoded's side; the log is not to be filled meanwhile."""
    monkeypatch.setattr("prefilld.reconnection.FIRST_PAUSE_S", 0.001)
    refuse = wire.Refuse(code="fingerprint", field="f", ours="1", theirs="2", message="m")

    async def scene() -> None:
        async with linked(service, host) as world:

            def refuse_it(decoded: Decoded) -> None:
                if len(world.decodeds) < 3:
                    decoded.react = lambda _: decoded.socket.send(refuse)

            world.prepare = refuse_it
            await world.opened()
            assert len(world.decodeds) == 4
            assert events(logs).count("link.failed") == 1
            (line,) = [line for line in logs if line["event"] == "link.failed"]
            assert "f is '2' here and '1' there" in line["reason"]

    play(scene())


def test_a_hand_shake_that_takes_too_long_is_given_up(
    make_service: Callable[..., RecordingService], host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        service = make_service(link__handshake_timeout_s=0.05)
        async with linked(service, host) as world:

            def be_silent(decoded: Decoded) -> None:
                decoded.answers = bool(world.decodeds)

            world.prepare = be_silent
            await until(lambda: "link.failed" in events(logs))
            (line,) = [line for line in logs if line["event"] == "link.failed"]
            assert line["reason"] == "the hand-shake took too long"
            await world.decodeds[0].until(lambda: world.decodeds[0].closed)

    play(scene())


def test_a_lost_link_is_found_again(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.close()
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            assert world.num_changes == 3
            assert "link.lost" in events(logs)

    play(scene())


def test_what_was_sent_and_not_adopted_goes_to_the_next_decoded(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            client, _ = await streaming_client()
            request = new_request(client, start_blocks=3)
            request.hold = world.holds.take(request.num_tokens)
            request.answer_ids.append(7)
            world.desk.ready(request)
            world.desk.pump()
            await decoded.until_received(wire.Handoff)
            decoded.socket.close()
            await until(lambda: len(world.decodeds) == 2)
            again = await world.decoded.until_received(wire.Handoff)
            assert isinstance(again, wire.Handoff)
            assert again.request.id == request.id
            assert again.lease == 2

    play(scene())


def test_an_adopt_in_the_queue_of_a_dead_link_still_counts(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """Handing the request over again would give its stream two writers."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            client, _ = await streaming_client()
            request = new_request(client, start_blocks=3)
            request.hold = world.holds.take(request.num_tokens)
            request.answer_ids.append(7)
            world.desk.ready(request)
            world.desk.pump()
            message = await decoded.until_received(wire.Handoff)
            assert isinstance(message, wire.Handoff)
            decoded.socket.send(
                wire.Adopt(epoch=EPOCH, lease=message.lease, credits=credits(seen=1))
            )
            decoded.socket.close()
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            assert world.owner.adopted_ids == ["r"]
            assert world.decoded.messages[-1] != message
            assert wire.Handoff not in map(type, world.decoded.messages)

    play(scene())


def test_adopted_blocks_are_quarantined_while_a_lost_peer_lives(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """The peer of this test is this very process, so it is never proved gone."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            await world.opened()
            lease_id = await world.adopted()
            first = world.decoded
            world.prepare = lambda decoded: decoded.held.append(lease_id)
            first.socket.close()
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            assert world.allocator.counts().quarantined == 1
            world.decoded.socket.send(wire.Release(epoch=EPOCH, lease=lease_id, credits=credits()))
            await until(lambda: world.allocator.counts().quarantined == 0)
            assert world.allocator.counts().free == world.allocator.num_blocks - 1

    play(scene())


@pytest.mark.parametrize(
    ("last_words", "num_deaths"),
    [([], 1), ([wire.Bye()], 1), ([wire.Drain(), wire.Bye()], 0), ([wire.Drain()], 0)],
    ids=["none", "bye", "drain-bye", "drain"],
)
def test_a_decoded_that_had_not_announced_its_end_has_died(
    service: RecordingService,
    host: ModelHost,
    logs: list[Any],
    last_words: list[wire.Message],
    num_deaths: int,
) -> None:
    """A daemon that fails says BYE as well, so that alone excuses nothing."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            world.casualties.adopted("r")
            for message in last_words:
                decoded.socket.send(message)
            decoded.socket.close_when_flushed()
            await until(lambda: len(world.decodeds) == 2)
            assert world.casualties.came_back("r") == num_deaths

    play(scene())


def test_what_was_lent_when_decoded_died_is_counted(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """It goes to the next one, and may kill that one too."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            for _ in range(2):
                decoded = await world.opened()
                client, _ = await streaming_client()
                request = new_request(client, start_blocks=3)
                request.hold = world.holds.take(request.num_tokens)
                request.answer_ids.append(7)
                assert not world.casualties.is_poisoned(request.id)
                world.desk.ready(request)
                world.desk.pump()
                await decoded.until_received(wire.Handoff)
                decoded.socket.close()
                await until(lambda: not world.link.is_open)
                world.desk.withdraw(request)
            assert world.casualties.is_poisoned("r")

    play(scene())


def test_decoded_s_answers_reach_the_leases(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            client, _ = await streaming_client()
            request = new_request(client, num_tokens=40, start_blocks=6)
            request.hold = world.holds.take(request.num_tokens)
            request.state = RequestState.RUNNING
            request.computed_tokens = 32
            world.desk.announce(request)
            chunk = await decoded.until_received(wire.Chunk)
            assert isinstance(chunk, wire.Chunk)
            decoded.socket.send(
                wire.NoChunk(epoch=EPOCH, lease=chunk.lease, credits=credits(seen=1))
            )
            await until(lambda: not request.is_reserved)
            request.answer_ids.append(7)
            world.desk.ready(request)
            world.desk.pump()
            await decoded.until_received(wire.Handoff)
            decoded.socket.send(
                wire.Reject(
                    epoch=EPOCH,
                    lease=chunk.lease,
                    code="no-room",
                    message="full",
                    credits=credits(seen=2, blocks=0),
                )
            )
            await until(lambda: world.owner.rejections == [("r", "no-room", "full")])
            states = {world.allocator.state(block) for block in request.blocks}
            assert states == {BlockState.ACTIVE}

    play(scene())


def test_room_that_comes_free_is_used_at_once(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            client, _ = await streaming_client()
            request = new_request(client, start_blocks=31)
            request.hold = world.holds.take(request.num_tokens)
            request.answer_ids.append(7)
            world.desk.ready(request)
            world.desk.pump()
            assert world.desk.num_ready == 1
            decoded.socket.send(wire.CreditUpdate(credits=credits(blocks=31)))
            await decoded.until_received(wire.Handoff)

    play(scene())


def test_a_decoded_that_contradicts_itself_loses_the_link_and_nothing_else(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.send(wire.CreditUpdate(credits=credits(seen=5)))
            await decoded.until(lambda: decoded.closed)
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            lines = [line for line in logs if line["event"] == "link.refused"]
            assert [line["code"] for line in lines] == ["invalid-message"]

    play(scene())


def test_a_contradiction_in_mapped_itself_ends_the_link_at_once(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:

            def lie(decoded: Decoded) -> None:
                if not world.decodeds:
                    decoded.behind_mapped = [wire.CreditUpdate(credits=credits(seen=1))]

            world.prepare = lie
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            assert "link.refused" in events(logs)

    play(scene())


def test_a_link_that_ends_as_it_opens_is_tried_again(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """MAPPED and the end of the stream arrive together."""

    async def scene() -> None:
        async with linked(service, host) as world:

            def end(decoded: Decoded) -> None:
                decoded.ends_behind_mapped = not world.decodeds

            world.prepare = end
            await until(lambda: len(world.decodeds) == 2 and world.link.is_open)
            assert events(logs).count("link.failed") == 1
            assert events(logs).count("link.opened") == 1

    play(scene())


def test_what_came_right_behind_mapped_is_heeded(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:

            def drain(decoded: Decoded) -> None:
                decoded.behind_mapped = [wire.Drain()]

            world.prepare = drain
            await world.opened()
            assert "link.draining" in events(logs)

    play(scene())


def test_a_draining_decoded_gets_nothing_new(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.send(wire.Drain())
            await until(lambda: "link.draining" in events(logs))
            client, _ = await streaming_client()
            request = new_request(client, start_blocks=3)
            request.hold = world.holds.take(request.num_tokens)
            world.desk.ready(request)
            world.desk.pump()
            assert world.desk.num_ready == 1

    play(scene())


# --- is it still there? ----------------------------------------------------------------------


def test_a_ping_is_answered(service: RecordingService, host: ModelHost, logs: list[Any]) -> None:
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.send(wire.Ping(sent_ns=77))
            pong = await decoded.until_received(wire.Pong)
            assert pong == wire.Pong(sent_ns=77)

    play(scene())


def test_silence_is_asked_about_and_then_ends_the_link(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            num_pings = len(decoded.messages)
            world.link.tick()
            service.clock.advance(1)
            world.link.tick()
            await decoded.until(lambda: len(decoded.messages) > num_pings)
            service.clock.advance(8.9)
            world.link.tick()
            assert world.link.is_open
            service.clock.advance(0.1)
            world.casualties.adopted("r")
            world.link.tick()
            assert not world.link.is_open
            assert "link.silent" in events(logs)
            assert world.casualties.came_back("r") == 0, "it may only sleep"

    play(scene())


def test_any_message_is_a_sign_of_life(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            service.clock.advance(9)
            decoded.socket.send(wire.Pong(sent_ns=1, credits=credits()))
            await until(lambda: world.link.status()["rtt_us"])
            service.clock.advance(9)
            world.link.tick()
            assert world.link.is_open

    play(scene())


# --- ends ------------------------------------------------------------------------------------


def test_closing_says_bye(service: RecordingService, host: ModelHost, logs: list[Any]) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            world.casualties.adopted("r")
            world.link.close()
            assert not world.link.is_open
            await decoded.until_received(wire.Bye)
            assert world.casualties.came_back("r") == 0, "it was we who left"
            assert "link.closed" in events(logs)
            assert "link.lost" not in events(logs)

    play(scene())


def test_a_decoded_that_says_bye_is_no_fault(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.send(wire.Bye())
            decoded.socket.close_when_flushed()
            await until(lambda: "link.closed" in events(logs))
            assert "link.lost" not in events(logs)

    play(scene())


def test_a_link_that_was_told_of_room_is_lost_like_any_other(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """An operator looks for `link.lost`."""

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            decoded.socket.send(wire.CreditUpdate(credits=credits()))
            decoded.socket.close()
            await until(lambda: {"link.lost", "link.closed"} & set(events(logs)))
            assert "link.lost" in events(logs)

    play(scene())


def test_a_decoded_that_leaves_as_the_link_opens_harms_nobody(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """MAPPED and BYE arrive in one piece."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:

            def leave(decoded: Decoded) -> None:
                if not world.decodeds:
                    decoded.behind_mapped = [wire.Bye()]

            world.prepare = leave
            await until(lambda: len(world.decodeds) == 2 or service.failures)
            failures = service.failures[:]
            service.failures.clear()
            assert failures == []

    play(scene())


def test_nothing_is_sent_to_a_decoded_that_said_bye(
    service: RecordingService, host: ModelHost, logs: list[Any]
) -> None:
    """Between BYE and the end of the stream a prefill may complete, or a request end."""
    assert logs == []

    async def scene() -> None:
        async with linked(service, host) as world:
            decoded = await world.opened()
            client, _ = await streaming_client()
            request = new_request(client, start_blocks=3)
            request.hold = world.holds.take(request.num_tokens)
            decoded.socket.send(wire.Bye())
            await turns()
            world.desk.ready(request)
            world.desk.pump()
            assert world.desk.num_ready == 1

    play(scene())
