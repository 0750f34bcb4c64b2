"""The desk that hands requests over: room first, in order, one connection at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Iterator

import pytest
from structlog.testing import capture_logs

from prefilld.credits import REJECT_PAUSE_NS
from prefilld.handoff import HandoffDesk
from prefilld.metrics import PrefillMetrics
from prefilld.request import Request, RequestState
from protocol import messages as wire
from protocol.codec import validate
from shared.clock import NS_PER_S, FakeClock
from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.control_page import ControlPage
from shared.kv.holds import BlockHolds
from shared.kv.leases import LeaseTable
from shared.logs import get_logger
from shared.metrics import Metrics
from tests.unit.prefilld.recorders import (
    BLOCK_SIZE,
    EPOCH,
    Link,
    Owner,
    clog,
    new_request,
    streaming_client,
)
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import run, turns, until


class World:
    """A desk over real books, real connections and a link that takes everything."""

    def __init__(self) -> None:
        self.page = ControlPage.create(8)
        self.allocator = BlockAllocator(64)
        self.holds = BlockHolds(self.allocator, block_size=BLOCK_SIZE)
        self.clock = FakeClock()
        self.metrics = Metrics()
        self.desk = HandoffDesk(
            epoch=EPOCH,
            block_size=BLOCK_SIZE,
            leases=LeaseTable(8),
            holds=self.holds,
            control_page=self.page,
            clock=self.clock,
            log=get_logger(),
            metrics=PrefillMetrics(self.metrics),
        )
        self.owner = Owner(self.desk)
        self.desk.attach(self.owner)
        self.link = Link()
        self.users: list[Recorder] = []
        self._num_requests = 0

    def open(self, *, blocks: int = 100, sequences: int = 8, held: list[int] | None = None) -> None:
        self.link = Link()
        self.desk.link_opened(self.link, held or [])
        self.credit(blocks=blocks, sequences=sequences, seen=0)

    def credit(self, *, blocks: int, seen: int, sequences: int = 8) -> None:
        self.desk.update_credits(
            wire.Credits(free_blocks=blocks, free_sequences=sequences, queue_depth=0, seen=seen)
        )

    def lose(self, *, peer_is_gone: bool = False) -> None:
        self.desk.link_lost(peer_is_gone=peer_is_gone, grace_s=10)

    async def running(
        self, *, num_tokens: int = 10, start_blocks: int = 5, send_buffer_bytes: int | None = None
    ) -> Request:
        """Return the next request, with blocks, whose prompt is being computed."""
        client, user = await streaming_client(send_buffer_bytes=send_buffer_bytes)
        self.users.append(user)
        self._num_requests += 1
        request = new_request(
            client,
            request_id=f"r{self._num_requests}",
            num_tokens=num_tokens,
            start_blocks=start_blocks,
            arrived_ns=self._num_requests,
        )
        request.hold = self.holds.take(request.num_tokens)
        request.state = RequestState.RUNNING
        return request

    async def ready(self, *, start_blocks: int = 5) -> Request:
        """Return the next request, whose first token is known."""
        request = await self.running(start_blocks=start_blocks)
        self.finish_prompt(request)
        return request

    def finish_prompt(self, request: Request) -> None:
        request.computed_tokens = request.num_tokens
        request.answer_ids.append(7)
        self.desk.ready(request)

    def states(self, request: Request) -> set[BlockState]:
        return {self.allocator.state(block) for block in request.blocks}


@pytest.fixture
def world() -> Iterator[World]:
    with capture_logs():
        world = World()
        yield world
    world.holds.check_integrity()
    world.page.close()


def play(scene: Coroutine[object, object, None]) -> None:
    run(scene)


# --- handing over ----------------------------------------------------------------------------


def test_a_handoff_carries_the_request_and_its_connection(world: World) -> None:
    async def scene() -> None:
        world.open()
        request = await world.ready()
        world.desk.pump()
        (message,) = world.link.sent
        assert isinstance(message, wire.Handoff)
        validate(message)
        assert message.request.id == "r1"
        assert message.blocks == list(request.blocks)
        ((fd,),) = world.link.fds
        with socket.socket(fileno=fd) as connection:
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
            connection.detach()
        assert request.state is RequestState.SENT
        assert (world.desk.num_ready, world.desk.lending.num_sent) == (0, 1)
        assert not request.client.is_open, "nothing is written to it until ADOPT or REJECT"

    play(scene())


def test_without_a_link_requests_wait(world: World) -> None:
    async def scene() -> None:
        await world.ready()
        world.desk.pump()
        assert (world.desk.num_ready, world.desk.lending.num_sent) == (1, 0)
        world.open()
        world.desk.pump()
        assert world.link.handed_over == ["r1"]

    play(scene())


def test_nothing_is_handed_over_before_decoded_told_its_room(world: World) -> None:
    async def scene() -> None:
        await world.ready()
        world.desk.link_opened(world.link, [])
        world.desk.pump()
        assert world.link.sent == []

    play(scene())


def test_room_is_spent_as_it_is_promised(world: World) -> None:
    """Two requests of 5 blocks fit 12, a third does not, until decoded tells of more."""

    async def scene() -> None:
        world.open(blocks=12)
        for _ in range(3):
            await world.ready()
        world.desk.pump()
        assert world.link.handed_over == ["r1", "r2"]
        world.credit(blocks=5, seen=2)
        world.desk.pump()
        assert world.link.handed_over == ["r1", "r2", "r3"]

    play(scene())


def test_places_are_spent_as_blocks_are(world: World) -> None:
    async def scene() -> None:
        world.open(sequences=1)
        await world.ready()
        await world.ready()
        world.desk.pump()
        assert world.link.handed_over == ["r1"]

    play(scene())


def test_a_new_link_starts_with_new_credits(world: World) -> None:
    """What was spent on the old one says nothing about the new decoded."""

    async def scene() -> None:
        world.open(blocks=5)
        await world.ready()
        world.desk.pump()
        world.lose()
        world.open(blocks=5)
        world.desk.pump()
        assert world.link.handed_over == ["r1"]

    play(scene())


def test_nobody_overtakes_at_the_hand_off(world: World) -> None:
    """A large request would starve behind a stream of small ones."""

    async def scene() -> None:
        world.open(blocks=10)
        await world.ready(start_blocks=11)
        await world.ready(start_blocks=1)
        world.desk.pump()
        assert world.link.handed_over == []
        world.credit(blocks=13, seen=0)
        world.desk.pump()
        assert world.link.handed_over == ["r1", "r2"]

    play(scene())


def test_what_a_smaller_decoded_can_never_take_holds_up_nobody(world: World) -> None:
    """It is sent, for the REJECT that says so; those behind it would wait until it timed out."""

    async def scene() -> None:
        world.desk.link_opened(world.link, [], pool_blocks=8)
        world.credit(blocks=8, seen=0)
        largest = await world.ready(start_blocks=9)
        other = await world.ready(start_blocks=5)
        world.desk.pump()
        assert [request.state for request in (largest, other)] == [
            RequestState.SENT,
            RequestState.READY,
        ]
        assert largest.lease_id is not None
        world.credit(blocks=8, seen=1)
        world.desk.lending.on_reject(largest.lease_id, "too-large", "lacks 1 block")
        assert world.owner.rejections == [("r1", "too-large", "lacks 1 block")]
        world.desk.withdraw(largest)
        world.clock.advance(REJECT_PAUSE_NS / NS_PER_S)
        world.desk.pump()
        assert other.state is RequestState.SENT

    play(scene())


def test_a_slow_client_holds_up_nobody_but_itself(world: World) -> None:
    """Its first token must be in the kernel before its connection can leave."""

    async def scene() -> None:
        world.open()
        slow = await world.running(send_buffer_bytes=4_608)
        world.users[0].socket._loop.remove_reader(world.users[0].raw)  # it does not read
        clog(slow.client)
        world.finish_prompt(slow)
        await world.ready()
        world.desk.pump()
        assert world.link.handed_over == ["r2"]
        assert slow.state is RequestState.READY
        world.users[0].socket._loop.add_reader(
            world.users[0].raw, world.users[0].socket._on_readable
        )
        await until(lambda: slow.client.is_flushed)
        world.desk.pump()
        assert world.link.handed_over == ["r2", "r1"]

    play(scene())


def test_a_slow_client_that_lacks_room_as_well_holds_up_nobody(world: World) -> None:
    """It could not go even with room, so others may have what there is."""

    async def scene() -> None:
        world.open(blocks=5)
        slow = await world.running(start_blocks=6, send_buffer_bytes=4_608)
        world.users[0].socket._loop.remove_reader(world.users[0].raw)
        clog(slow.client)
        world.finish_prompt(slow)
        await world.ready(start_blocks=5)
        world.desk.pump()
        assert world.link.handed_over == ["r2"]

    play(scene())


def test_a_draining_decoded_is_handed_nothing(world: World) -> None:
    async def scene() -> None:
        world.open()
        await world.ready()
        running = await world.running()
        world.desk.peer_drains()
        world.desk.pump()
        running.computed_tokens = 8
        world.desk.announce(running)
        assert world.link.sent == []
        world.lose()
        world.open()
        world.desk.pump()
        assert world.link.handed_over == ["r1"], "its successor does not drain"

    play(scene())


def test_a_draining_decoded_is_handed_what_it_has_reserved_room_for(world: World) -> None:
    """It waits for that before it leaves; a successor would have to begin anew."""

    async def scene() -> None:
        world.open()
        running = await world.running()
        running.computed_tokens = 4
        world.desk.announce(running)
        world.desk.peer_drains()
        running.computed_tokens = 8
        world.desk.announce(running)
        assert [type(message) for message in world.link.sent] == [wire.Chunk, wire.Chunk]
        world.desk.ready(running)
        world.desk.pump()
        assert world.link.handed_over == [running.id]

    play(scene())


def test_bytes_read_but_not_parsed_travel_along(world: World) -> None:
    async def scene() -> None:
        world.open()
        request = await world.ready()
        world.users[0].raw.send(b"\x00\x00\x00")
        await turns()
        world.desk.pump()
        (message,) = world.link.sent
        assert isinstance(message, wire.Handoff)
        assert message.residue == b"\x00\x00\x00"
        assert request.state is RequestState.SENT

    play(scene())


def test_no_client_can_make_a_handoff_that_decoded_refuses(world: World) -> None:
    """Decoded ends the link over it, and over the same request again on the next link."""

    async def scene() -> None:
        world.open()
        request = await world.ready()
        half_a_frame = (1 << 20).to_bytes(4, "big") + bytes(100_000)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(world.users[0].raw, half_a_frame)
        await turns()
        if request.client.is_open:
            world.desk.pump()
        for message in world.link.sent:
            validate(message)

    play(scene())


# --- chunks ----------------------------------------------------------------------------------


def test_only_complete_blocks_are_announced_and_each_once(world: World) -> None:
    """The last one is still being written."""

    async def scene() -> None:
        world.open()
        request = await world.running(num_tokens=20)
        for computed, expected in ((3, []), (9, [0, 1]), (11, [0, 1]), (16, [0, 1, 2, 3])):
            request.computed_tokens = computed
            world.desk.announce(request)
            named = [block for message in world.link.of(wire.Chunk) for block in message.blocks]  # type: ignore[attr-defined]
            assert named == [request.blocks[index] for index in expected]
        first, second = world.link.sent
        assert isinstance(first, wire.Chunk)
        assert isinstance(second, wire.Chunk)
        assert (first.first, second.first) == (0, 2)
        assert first.lease == second.lease

    play(scene())


def test_the_last_blocks_come_with_what_decoded_begins_with(world: World) -> None:
    """And the engine is told where decoded looks for the first token."""

    async def scene() -> None:
        world.open()
        request = await world.running(num_tokens=10)
        for launched in (8, 10):
            assert request.first_token_place is None
            request.launched_tokens = launched
            world.desk.announce(request, event=launched)
        first, last = world.link.of(wire.Chunk)
        assert isinstance(first, wire.Chunk)
        assert isinstance(last, wire.Chunk)
        assert (first.first_step, first.event) == (None, 8)
        assert last.first_step is not None
        assert (last.first_step.num_tokens, last.event) == (10, 10)
        assert request.first_token_place == (last.slot, last.generation)

    play(scene())


def test_a_request_without_room_is_not_announced(world: World) -> None:
    async def scene() -> None:
        world.open(blocks=4)
        request = await world.running(start_blocks=5)
        request.computed_tokens = 8
        world.desk.announce(request)
        assert world.link.sent == []
        assert request.lease_id is None

    play(scene())


def test_a_declined_request_is_announced_no_more_and_handed_over_with_room(world: World) -> None:
    async def scene() -> None:
        world.open(blocks=5)
        request = await world.running(num_tokens=20)
        request.computed_tokens = 8
        world.desk.announce(request)
        assert request.lease_id is not None
        world.desk.lending.on_nochunk(request.lease_id)
        request.computed_tokens = 16
        world.desk.announce(request)
        assert len(world.link.sent) == 1
        world.credit(blocks=0, seen=1)
        world.finish_prompt(request)
        world.desk.pump()
        assert world.link.handed_over == []
        world.credit(blocks=5, seen=1)
        world.desk.pump()
        assert world.link.handed_over == ["r1"]

    play(scene())


def test_a_reserved_request_is_handed_over_without_more_room(world: World) -> None:
    """Its CHUNK took the room already."""

    async def scene() -> None:
        world.open(blocks=5, sequences=1)
        request = await world.running()
        request.computed_tokens = 8
        world.desk.announce(request)
        world.finish_prompt(request)
        world.desk.pump()
        assert world.link.handed_over == ["r1"]
        world.credit(blocks=0, sequences=0, seen=2)  # CHUNK and HANDOFF are both counted

    play(scene())


def test_reserved_room_is_used_even_behind_a_request_that_waits_for_room(world: World) -> None:
    """Otherwise the two wait for each other until a deadline ends one of them."""

    async def scene() -> None:
        world.open(blocks=7)
        large = await world.running(start_blocks=8)
        small = await world.running(start_blocks=5)
        small.computed_tokens = 8
        world.desk.announce(small)
        world.finish_prompt(large)
        world.finish_prompt(small)
        world.desk.pump()
        assert world.link.handed_over == ["r2"]

    play(scene())


def test_a_chunk_does_not_take_the_room_that_an_older_request_waits_for(world: World) -> None:
    """A stream of small prompts would keep a large one waiting for ever."""

    async def scene() -> None:
        world.open(blocks=7)
        await world.ready(start_blocks=8)
        small = await world.running(start_blocks=5)
        world.desk.pump()
        small.computed_tokens = 8
        world.desk.announce(small)
        assert world.link.sent == []

    play(scene())


# --- what becomes of it ----------------------------------------------------------------------


def test_adopt_closes_our_duplicate_without_a_trace_on_the_wire(world: World) -> None:
    async def scene() -> None:
        world.open()
        request = await world.ready()
        world.desk.pump()
        ((fd,),) = world.link.fds
        duplicate = socket.socket(fileno=socket.dup(fd))  # decoded's
        assert request.lease_id is not None
        world.clock.advance(0.25)
        world.desk.lending.on_adopt(request.lease_id)
        await turns()
        assert world.owner.adopted_ids == ["r1"]
        assert world.users[0].closed == [], "the connection lives on at decoded"
        duplicate.close()
        await world.users[0].until(lambda: world.users[0].closed)
        assert request.state is RequestState.ENDED

    play(scene())


def test_a_rejected_request_is_told_of_and_can_be_handed_over_again(world: World) -> None:
    async def scene() -> None:
        world.open()
        request = await world.ready()
        world.desk.pump()
        assert request.lease_id is not None
        world.desk.lending.on_reject(request.lease_id, "no-room", "full")
        assert world.owner.rejections == [("r1", "no-room", "full")]
        assert request.client.is_open
        assert world.states(request) == {BlockState.ACTIVE}
        world.desk.pump()
        assert len(world.link.sent) == 1, "asking again at once would only keep both busy"
        world.clock.advance(0.1)
        world.desk.pump()
        first, second = world.link.sent
        assert isinstance(first, wire.Handoff)
        assert isinstance(second, wire.Handoff)
        assert second.lease == first.lease + 1

    play(scene())


def test_a_request_that_came_back_goes_where_its_age_puts_it(world: World) -> None:
    async def scene() -> None:
        world.open(sequences=1)
        await world.ready()
        await world.ready()
        world.desk.pump()
        assert world.link.handed_over == ["r1"]
        world.lose()
        assert world.desk.num_ready == 2
        assert world.owner.rejections == [], "nothing is wrong with it"
        world.open()
        world.desk.pump()
        assert world.link.handed_over == ["r1", "r2"]

    play(scene())


def test_a_client_can_cancel_again_once_its_request_came_back(world: World) -> None:
    """What it sent meanwhile was read by nobody."""

    async def scene() -> None:
        world.open()
        request = await world.ready()
        world.desk.pump()
        world.users[0].socket.send(wire.Cancel())
        await turns()
        assert not request.client.is_cancelled
        world.lose()
        await until(lambda: request.client.is_cancelled)

    play(scene())


def test_a_running_prefill_goes_on_when_the_link_is_lost(world: World) -> None:
    """It is announced anew over the next link, from its first block."""

    async def scene() -> None:
        world.open()
        request = await world.running(num_tokens=20)
        request.computed_tokens = 8
        world.desk.announce(request)
        world.lose()
        assert request.state is RequestState.RUNNING
        assert world.desk.num_ready == 0
        world.open()
        request.computed_tokens = 12
        world.desk.announce(request)
        (message,) = world.link.sent
        assert isinstance(message, wire.Chunk)
        assert (message.first, message.blocks) == (0, list(request.blocks[:3]))

    play(scene())


def test_a_withdrawn_request_is_handed_over_no_more_and_its_blocks_are_free(world: World) -> None:
    async def scene() -> None:
        request = await world.ready()
        world.desk.withdraw(request)
        assert world.owner.num_wakes == 1, "others may have the blocks"
        world.open()
        world.desk.pump()
        assert world.link.sent == []
        assert world.states(request) == {BlockState.FREE}

    play(scene())


def test_an_announced_request_that_ends_here_is_aborted(world: World) -> None:
    async def scene() -> None:
        world.open()
        request = await world.running()
        request.computed_tokens = 8
        world.desk.announce(request)
        lease_id = request.lease_id
        world.desk.withdraw(request)
        assert world.link.sent[1:] == [wire.Abort(epoch=EPOCH, lease=lease_id or 0)]
        assert world.states(request) == {BlockState.LEASED}

    play(scene())


def test_without_a_link_nothing_is_aborted(world: World) -> None:
    world.desk.send_abort(3)
    assert world.link.sent == []
