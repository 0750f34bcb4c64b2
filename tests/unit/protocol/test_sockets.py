"""Message sockets on real socket pairs: delivery, bounds, ends, and whose descriptor is whose."""

from __future__ import annotations

import os
import resource
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvloop
from msgspec.structs import replace

from protocol import messages as m
from protocol.closing import CloseKind
from protocol.codec import encode_message
from protocol.connection import Connection
from protocol.errors import LocalProtocolError, MalformedFrameError
from protocol.frames import LENGTH
from protocol.sockets import MessageSocket
from protocol.states import Role, State
from tests.support.descriptors import num_descriptors
from tests.unit.protocol.conftest import Run
from tests.unit.protocol.recorder import (
    Recorder,
    fill,
    open_link,
    socketpair,
)
from tests.unit.protocol.samples import REQUEST, SAMPLES

BIG_HANDOFF = replace(
    SAMPLES[m.Handoff], blocks=list(range(1, 60_001)), request=replace(REQUEST, ids=[70_000] * 100)
)
"""About 200 KiB: many times what a socket with a tiny send buffer takes at once."""


@pytest.fixture(autouse=True)
def no_descriptor_leaks() -> Iterator[None]:
    """Whatever a test does, it ends with as many open descriptors as it began with."""
    uvloop.new_event_loop().close()  # the first one in a process opens a pipe for signals, for good
    before = num_descriptors()
    yield
    assert num_descriptors() == before


@contextmanager
def a_file() -> Iterator[int]:
    """A descriptor that can be told from others: a pipe's read end with a byte in it."""
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, b"!")
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def close_both(one: Recorder, other: Recorder) -> None:
    for end in (one, other):
        for fds in end.fds:
            for fd in fds or []:
                os.close(fd)
        end.socket.close()


def streaming_client() -> Connection:
    connection = Connection(Role.PREFILLD_CLIENT)
    connection.receive_data(encode_message(SAMPLES[m.Generate]))
    connection.next_event()
    connection.send(SAMPLES[m.Accepted])
    return connection


# --- delivery -----------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_whole(run: Run) -> None:
    """A stream socket cuts and merges as it likes; messages do not notice."""

    async def scenario() -> None:
        prefilld, decoded = await open_link(send_buffer_bytes=4608)
        sent = [replace(SAMPLES[m.Chunk], first=i, blocks=[i + 1] * (i * 7)) for i in range(200)]
        for chunk in sent:
            prefilld.socket.send(chunk)
        await decoded.until(lambda: len(decoded.messages) == len(sent))
        assert decoded.messages == sent
        assert prefilld.socket.is_flushed
        close_both(prefilld, decoded)

    run(scenario())


def test_on_sent_speaks_when_the_last_byte_is_with_the_kernel(run: Run) -> None:
    """At once where there is room; after the peer has read where there is not."""

    async def scenario() -> None:
        prefilld, decoded = await open_link(send_buffer_bytes=4608)
        order: list[str] = []
        prefilld.socket.send(SAMPLES[m.Ping], on_sent=lambda: order.append("small"))
        assert order == ["small"]
        with a_file() as fd:
            prefilld.socket.send(BIG_HANDOFF, [fd], on_sent=lambda: order.append("big"))
            prefilld.socket.send(SAMPLES[m.Ping], on_sent=lambda: order.append("last"))
            assert order == ["small"]
            assert not prefilld.socket.is_flushed
            await prefilld.socket.flush()
        assert order == ["small", "big", "last"]
        await prefilld.until(lambda: prefilld.num_flushed)
        await decoded.until(lambda: len(decoded.messages) == 3)
        close_both(prefilld, decoded)

    run(scenario())


def test_a_send_from_on_sent_keeps_its_place(run: Run) -> None:
    """The callback of one frame may send the next; the order on the wire is the order of calls."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        pings = [m.Ping(sent_ns=n) for n in range(3)]
        prefilld.socket.send(pings[0], on_sent=lambda: prefilld.socket.send(pings[1]))
        prefilld.socket.send(pings[2])
        await decoded.until(lambda: len(decoded.messages) == 3)
        assert decoded.messages == pings
        close_both(prefilld, decoded)

    run(scenario())


def test_only_started_sockets_send(run: Run) -> None:
    """Before `start` nobody would hear that the connection ended."""

    async def scenario() -> None:
        one, other = socketpair()
        with other:
            unstarted = Recorder(one, Role.PREFILLD_LINK)
            with pytest.raises(LocalProtocolError, match="before `start`"):
                unstarted.socket.send(SAMPLES[m.Hello])
            unstarted.start().socket.close()

    run(scenario())


# --- descriptors --------------------------------------------------------------------------------


def test_a_descriptor_rides_on_the_first_byte_and_never_twice(run: Run) -> None:
    """A frame that takes hundreds of writes passes its descriptor exactly once."""

    async def scenario() -> None:
        prefilld, decoded = await open_link(send_buffer_bytes=4608)
        before = num_descriptors()
        with a_file() as fd:
            prefilld.socket.send(BIG_HANDOFF, [fd])
            assert not prefilld.socket.is_flushed
            await decoded.until_received(m.Handoff)
            (received,) = decoded.fds
            assert received is not None
            assert len(received) == 1
            assert os.read(received[0], 1) == b"!"
            assert not os.get_inheritable(received[0])
            assert num_descriptors() == before + 3  # the pipe's two ends, and one duplicate
        close_both(prefilld, decoded)

    run(scenario())


def test_a_full_socket_takes_neither_byte_nor_descriptor(run: Run) -> None:
    """EAGAIN means that nothing went out, so the descriptor goes with the retry."""

    async def scenario() -> None:
        one, other = socketpair(4608)
        prefilld = Recorder(one, Role.PREFILLD_LINK).start()
        prefilld.socket.connection._state, prefilld.socket.connection._epoch = (
            State.OPEN,
            SAMPLES[m.Handoff].epoch,  # type: ignore[attr-defined]
        )
        num_zeros = fill(one)
        with a_file() as fd:
            prefilld.socket.send(SAMPLES[m.Handoff], [fd])
            assert prefilld.socket.num_sent_bytes == 0
            while num_zeros:
                num_zeros -= len(other.recv(min(num_zeros, 4096)))
            await prefilld.socket.flush()
        decoded = Recorder(other, Role.DECODED_LINK)
        decoded.socket.connection._state, decoded.socket.connection._epoch = (
            State.OPEN,
            SAMPLES[m.Handoff].epoch,  # type: ignore[attr-defined]
        )
        decoded.start()
        await decoded.until_received(m.Handoff)
        assert len(decoded.fds[0] or []) == 1
        close_both(prefilld, decoded)

    run(scenario())


def test_each_handoff_gets_its_own_descriptor(run: Run) -> None:
    """However the kernel merges frames into reads, no two requests swap their clients."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        pipes = [os.pipe() for _ in range(40)]
        for lease, (read_end, write_end) in enumerate(pipes, start=1):
            os.write(write_end, bytes([lease]))
            prefilld.socket.send(SAMPLES[m.Ping])
            prefilld.socket.send(replace(SAMPLES[m.Handoff], lease=lease), [read_end])
            prefilld.socket.send(SAMPLES[m.Chunk])
        await decoded.until(lambda: len(decoded.messages) == 120)
        for message, fds in zip(decoded.messages, decoded.fds, strict=True):
            assert fds is not None
            if isinstance(message, m.Handoff):
                assert os.read(fds[0], 1) == bytes([message.lease])
            else:
                assert fds == []
        for pipe in pipes:
            for fd in pipe:
                os.close(fd)
        close_both(prefilld, decoded)

    run(scenario())


def raw_send(sender: Recorder, data: bytes, fds: list[int]) -> None:
    sender.raw.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])


def test_a_handoff_without_its_descriptor_says_so(run: Run) -> None:
    """The frame is delivered with None, for decoded to answer REJECT fd-lost."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        prefilld.raw.send(encode_message(SAMPLES[m.Handoff]))
        await decoded.until_received(m.Handoff)
        assert decoded.fds == [None]
        close_both(prefilld, decoded)

    run(scenario())


def test_a_missing_descriptor_is_not_taken_from_the_next_frame(run: Run) -> None:
    """Two HANDOFFs in one read, the first without: the second keeps its client."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        with a_file() as fd:
            prefilld.raw.send(encode_message(SAMPLES[m.Handoff]))
            raw_send(prefilld, encode_message(replace(SAMPLES[m.Handoff], lease=2)), [fd])
            await decoded.until(lambda: len(decoded.messages) == 2)
            assert decoded.fds[0] is None
            assert len(decoded.fds[1] or []) == 1
        close_both(prefilld, decoded)

    run(scenario())


def test_descriptors_that_nobody_asked_for_are_closed(run: Run) -> None:
    """On PING, in the middle of a frame, or too many on a HANDOFF: none stays open."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        with a_file() as fd:
            before = num_descriptors()
            raw_send(prefilld, encode_message(SAMPLES[m.Ping]), [fd, fd])
            handoff = encode_message(SAMPLES[m.Handoff])
            raw_send(prefilld, handoff, [fd, fd, fd])
            prefilld.raw.send(handoff[:9])
            await decoded.until(lambda: len(decoded.messages) == 2)
            assert decoded.fds[0] == []
            assert len(decoded.fds[1] or []) == 1
            assert num_descriptors() == before + 1
        close_both(prefilld, decoded)
        assert decoded.closed[-1].kind is CloseKind.LOCAL

    run(scenario())


def test_descriptors_of_an_unfinished_frame_are_closed_with_the_link(run: Run) -> None:
    """The sender died in mid-frame; its client must not stay open in us."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        with a_file() as fd:
            before = num_descriptors()
            raw_send(prefilld, encode_message(SAMPLES[m.Handoff])[:20], [fd])
            prefilld.socket.close()
            await decoded.until(lambda: decoded.closed)
            assert num_descriptors() == before - 2
        assert decoded.messages == []

    run(scenario())


@pytest.mark.parametrize("role", [Role.PREFILLD_CLIENT, Role.DECODED_CLIENT])
def test_a_client_cannot_fill_a_daemon_with_descriptors(run: Run, role: Role) -> None:
    """Where no message carries any, the kernel drops them before they are open."""

    async def scenario() -> None:
        one, other = socketpair()
        daemon = Recorder(other, role).start()
        with one, a_file() as fd:
            before = num_descriptors()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd] * 50))]
            one.sendmsg([encode_message(SAMPLES[m.StatusRequest])], rights)
            await daemon.until_received(m.StatusRequest)
            assert daemon.fds == [[]]
            assert num_descriptors() == before
        daemon.socket.close()

    run(scenario())


def test_a_descriptor_that_cannot_be_opened_is_reported_lost(run: Run) -> None:
    """At the limit of open files only MSG_CTRUNC tells; frame and link go on."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with a_file() as fd:
            # A limit at the lowest free number: nothing more can be opened, all else goes on.
            free = os.dup(fd)
            os.close(free)
            prefilld.socket.send(SAMPLES[m.Handoff], [fd])
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            try:
                await decoded.until_received(m.Handoff)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            prefilld.socket.send(replace(SAMPLES[m.Handoff], lease=2), [fd])
            await decoded.until(lambda: len(decoded.messages) == 2)
        assert decoded.fds[0] is None
        assert len(decoded.fds[1] or []) == 1
        close_both(prefilld, decoded)

    run(scenario())


def test_one_of_two_descriptors_is_none_at_all(run: Run) -> None:
    """MAP needs pool and control page; with half of them the other is closed."""

    async def scenario() -> None:
        one, other = socketpair()
        with one, a_file() as fd:
            decoded = Recorder(other, Role.DECODED_LINK).start()
            before = num_descriptors()
            one.send(encode_message(SAMPLES[m.Hello]))
            await decoded.until_received(m.Hello)
            decoded.socket.send(SAMPLES[m.Welcome])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
            one.sendmsg([encode_message(SAMPLES[m.Map])], rights)
            await decoded.until_received(m.Map)
            assert decoded.fds[-1] is None
            assert num_descriptors() == before
            decoded.socket.close()

    run(scenario())


def test_a_message_goes_out_with_exactly_its_descriptors(run: Run) -> None:
    """A HANDOFF without its client, or a PING with one, is our own bug."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        with pytest.raises(LocalProtocolError, match="Handoff carries 1 descriptors, not 0"):
            prefilld.socket.send(SAMPLES[m.Handoff])
        with pytest.raises(LocalProtocolError, match="Ping carries 0 descriptors, not 1"):
            prefilld.socket.send(SAMPLES[m.Ping], [0])
        close_both(prefilld, decoded)

    run(scenario())


# --- ends ---------------------------------------------------------------------------------------


def test_adopts_in_the_queue_of_a_dead_link_are_delivered_first(run: Run) -> None:
    """Decoded adopted, then died; prefilld must know before it hands those requests to another."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        for lease in range(1, 51):
            decoded.socket.send(replace(SAMPLES[m.Adopt], lease=lease))
        decoded.raw.send(encode_message(SAMPLES[m.Adopt])[:7])
        os.close(decoded.raw.detach())  # as the kernel does for a killed process
        prefilld.socket.send(SAMPLES[m.Ping])  # fails: the peer is gone
        assert prefilld.messages == []
        assert prefilld.closed == []
        await prefilld.until(lambda: prefilld.closed)
        assert [message.lease for message in prefilld.messages] == list(range(1, 51))  # type: ignore[attr-defined]
        assert [reason.kind for reason in prefilld.closed] == [CloseKind.GONE]

    run(scenario())


def test_draining_takes_what_was_sent_and_lets_nothing_more_in(run: Run) -> None:
    """A link past its deadline is shut first, so that no ADOPT can slip in behind the last look."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        decoded.socket.send(SAMPLES[m.Adopt])
        prefilld.socket.shutdown_read_and_drain()
        assert prefilld.messages == [SAMPLES[m.Adopt]]
        assert [reason.kind for reason in prefilld.closed] == [CloseKind.LOCAL]
        decoded.socket.send(SAMPLES[m.Release])
        await decoded.until(lambda: decoded.closed)
        assert decoded.closed[0].kind is CloseKind.GONE
        prefilld.socket.shutdown_read_and_drain()
        assert len(prefilld.closed) == 1

    run(scenario())


def test_nothing_slips_in_behind_the_last_look(run: Run) -> None:
    """Decoded's write fails while prefilld drains; were it to succeed, an ADOPT could be missed."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        failed: list[OSError] = []

        def send_more(_: m.Message) -> None:
            try:
                decoded.raw.send(encode_message(SAMPLES[m.Release]))
            except BrokenPipeError as error:
                failed.append(error)

        prefilld.react = send_more
        decoded.socket.send(SAMPLES[m.Adopt])
        prefilld.socket.shutdown_read_and_drain()
        assert prefilld.messages == [SAMPLES[m.Adopt]]
        assert len(failed) == 1
        decoded.socket.close()

    run(scenario())


def test_draining_from_within_a_message_delivers_the_rest(run: Run) -> None:
    """The handler that gives up a link is often called by that link."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        prefilld.react = lambda _: prefilld.socket.shutdown_read_and_drain()
        for lease in (1, 2, 3):
            decoded.socket.send(replace(SAMPLES[m.Adopt], lease=lease))
        await prefilld.until(lambda: prefilld.closed)
        assert [message.lease for message in prefilld.messages] == [1, 2, 3]  # type: ignore[attr-defined]
        assert len(prefilld.closed) == 1
        await decoded.until(lambda: decoded.closed)

    run(scenario())


@pytest.mark.parametrize("half", [True, False])
def test_a_client_that_leaves_is_told_once(run: Run, half: bool) -> None:
    """EOF and half-close are the same cancel."""

    async def scenario() -> None:
        one, other = socketpair()
        daemon = Recorder(other, Role.PREFILLD_CLIENT).start()
        one.send(encode_message(SAMPLES[m.Generate]))
        await daemon.until_received(m.Generate)
        if half:
            one.shutdown(socket.SHUT_WR)
        else:
            one.close()
        await daemon.until(lambda: daemon.closed)
        daemon.socket.send(SAMPLES[m.Accepted])
        daemon.socket.close()
        assert [reason.kind for reason in daemon.closed] == [CloseKind.GONE]
        assert not daemon.socket.is_open
        one.close()

    run(scenario())


def test_a_peer_that_closed_on_our_bytes_has_simply_gone(run: Run) -> None:
    """Unread bytes make the kernel say ECONNRESET; it means EOF."""

    async def scenario() -> None:
        prefilld, decoded = await open_link()
        prefilld.socket.send(SAMPLES[m.Ping])
        os.close(decoded.raw.detach())
        await prefilld.until(lambda: prefilld.closed)
        assert [reason.kind for reason in prefilld.closed] == [CloseKind.GONE]

    run(scenario())


def test_broken_bytes_are_answered_and_end_that_connection_only(run: Run) -> None:
    """The client reads one ERROR with the code, then EOF."""

    async def scenario() -> None:
        one, other = socketpair()
        daemon = Recorder(other, Role.PREFILLD_CLIENT).start()
        client = Recorder(one, Role.CLIENT).start()
        one.send(LENGTH.pack(1) + b"\xc0")
        error = await client.until_received(m.Error)
        assert isinstance(error, m.Error)
        assert error.code == "malformed-frame"
        await client.until(lambda: client.closed)
        (reason,) = daemon.closed
        assert reason.kind is CloseKind.PROTOCOL
        assert isinstance(reason.error, MalformedFrameError)

    run(scenario())


def test_closing_waits_for_the_last_bytes_when_asked(run: Run) -> None:
    """END is the last message, and a slow client still gets all of it."""

    async def scenario() -> None:
        one, other = socketpair(4608)
        daemon = Recorder(other, Role.PREFILLD_CLIENT).start()
        client = Recorder(one, Role.CLIENT).start()
        client.socket.send(SAMPLES[m.MetricsRequest])
        await daemon.until_received(m.MetricsRequest)
        daemon.socket.send(m.Metrics(text="x" * 100_000))
        daemon.socket.close_when_flushed()
        assert daemon.closed == []
        await client.until_received(m.Metrics)
        await client.until(lambda: client.closed)
        await daemon.until(lambda: daemon.closed)
        assert daemon.closed[0].kind is CloseKind.LOCAL

    run(scenario())


def test_closing_ends_the_connection_for_duplicates_too(run: Run) -> None:
    """While prefilld's duplicate lives, only a shutdown lets the client see the end."""

    async def scenario() -> None:
        one, other = socketpair()
        duplicate = other.dup()
        with one, duplicate:
            Recorder(other, Role.DECODED_MIGRATED).start().socket.close()
            assert one.recv(1) == b""

    run(scenario())


def test_dropping_a_descriptor_leaves_the_connection_to_its_other_holder(run: Run) -> None:
    """Decoded's ADOPT failed: it closes unwritten, and prefilld goes on with the client."""

    async def scenario() -> None:
        one, other = socketpair()
        duplicate = other.dup()
        with one, duplicate:
            Recorder(other, Role.DECODED_MIGRATED).start().socket.close(shutdown=False)
            duplicate.send(b"still here")
            assert one.recv(99) == b"still here"

    run(scenario())


# --- bounds -------------------------------------------------------------------------------------


def test_a_reader_that_never_reads_is_bounded_and_closed_as_slow(run: Run) -> None:
    """Past the bound the queue is dropped, not grown."""

    async def scenario() -> None:
        prefilld, decoded = await open_link(send_buffer_bytes=4608, max_queue_bytes=100_000)
        decoded.socket._loop.remove_reader(decoded.raw)
        sizes = []
        chunk = replace(SAMPLES[m.Chunk], blocks=[1] * 5000)
        while prefilld.socket.is_open:
            prefilld.socket.send(chunk)
            sizes.append(prefilld.socket.num_queued_bytes)
        assert max(sizes) <= 100_000
        assert prefilld.closed == []  # never from within `send`
        await prefilld.until(lambda: prefilld.closed)
        assert [reason.kind for reason in prefilld.closed] == [CloseKind.SLOW]
        close_both(prefilld, decoded)

    run(scenario())


def test_a_stalled_reader_shows_in_the_bytes_sent(run: Run) -> None:
    """`client_stall_timeout` watches this number and nothing else."""

    async def scenario() -> None:
        prefilld, decoded = await open_link(send_buffer_bytes=4608)
        decoded.socket._loop.remove_reader(decoded.raw)
        prefilld.socket.send(replace(SAMPLES[m.Chunk], blocks=[1] * 50_000))
        stalled_at = prefilld.socket.num_sent_bytes
        queued = prefilld.socket.num_queued_bytes
        assert stalled_at > 0
        decoded.socket._loop.add_reader(decoded.raw, decoded.socket._on_readable)
        await prefilld.socket.flush()
        assert prefilld.socket.num_sent_bytes == stalled_at + queued
        close_both(prefilld, decoded)

    run(scenario())


# --- the hand-off -------------------------------------------------------------------------------


def test_a_detached_socket_is_read_by_nobody_here(run: Run) -> None:
    """From `detach` on each byte of the client's belongs to decoded, or is in the residue."""

    async def scenario() -> None:
        one, other = socketpair()
        cancel = encode_message(m.Cancel())
        daemon = Recorder(other, Role.PREFILLD_CLIENT, streaming_client()).start()
        one.send(encode_message(m.Cancel()) + cancel[:6])
        await daemon.until_received(m.Cancel)
        detached = daemon.socket.detach()
        one.send(cancel[6:])
        migrated = Connection(Role.DECODED_MIGRATED)
        migrated.receive_data(detached.residue)
        duplicate = detached.socket.dup()
        detached.socket.close()
        decoded = Recorder(duplicate, Role.DECODED_MIGRATED, migrated).start()
        assert await decoded.until_received(m.Cancel) == m.Cancel()
        assert len(daemon.messages) == 1
        assert daemon.closed == []
        decoded.socket.close()
        one.close()

    run(scenario())


def test_a_whole_message_in_the_residue_needs_no_more_bytes(run: Run) -> None:
    """Decoded delivers what came with HANDOFF even if the client never writes again."""

    async def scenario() -> None:
        one, other = socketpair()
        migrated = Connection(Role.DECODED_MIGRATED)
        migrated.receive_data(encode_message(m.Cancel()))
        decoded = Recorder(other, Role.DECODED_MIGRATED, migrated).start()
        await decoded.until_received(m.Cancel)
        decoded.socket.close()
        one.close()

    run(scenario())


def test_a_connection_is_handed_off_between_frames_only(run: Run) -> None:
    """Bytes of ours that still wait here would come after decoded's first ones."""

    async def scenario() -> None:
        one, other = socketpair(4608)
        daemon = Recorder(other, Role.PREFILLD_CLIENT, streaming_client()).start()
        daemon.socket.send(m.Tokens(index=0, ids=[1], text="x" * 50_000))
        with pytest.raises(LocalProtocolError, match="cannot be handed off"):
            daemon.socket.detach()
        client = Connection(Role.CLIENT)
        client.send(SAMPLES[m.Generate])
        reader = Recorder(one, Role.CLIENT, client).start()
        client.receive_data(encode_message(SAMPLES[m.Accepted]))
        await daemon.socket.flush()
        detached = daemon.socket.detach()
        detached.socket.close()
        await reader.until(lambda: reader.closed)

    run(scenario())


def test_what_was_not_adopted_is_taken_up_again(run: Run) -> None:
    """After REJECT the same connection goes on over a new message socket."""

    async def scenario() -> None:
        one, other = socketpair()
        daemon = Recorder(other, Role.PREFILLD_CLIENT, streaming_client()).start()
        detached = daemon.socket.detach()
        connection = daemon.socket.connection
        connection.reclaim(detached.residue)
        again = Recorder(detached.socket, Role.PREFILLD_CLIENT, connection).start()
        one.send(encode_message(m.Cancel()))
        await again.until_received(m.Cancel)
        again.socket.send(SAMPLES[m.End])
        again.socket.close_when_flushed()
        with one:
            assert one.recv(4096) == encode_message(SAMPLES[m.End])

    run(scenario())


def test_a_socket_says_where_it_stands(run: Run) -> None:
    """Its repr is what a debugger and a log line show."""

    async def scenario() -> None:
        one, other = socketpair()
        end = Recorder(one, Role.DECODED_LINK).start()
        assert repr(end.socket) == (
            "<MessageSocket <Connection decoded on the link: start>, 0 bytes queued>"
        )
        end.socket.close()
        assert "closed" in repr(end.socket)
        other.close()

    run(scenario())


def test_the_module_needs_no_event_loop_to_be_imported() -> None:
    """The command line imports its neighbours, and asyncio takes 100 ms to load."""
    assert "asyncio" not in MessageSocket.__init__.__globals__
