"""A client's connection while it is prefilld's, and on its way to decoded."""

from __future__ import annotations

import asyncio

import pytest

from protocol import messages as wire
from protocol.closing import CloseKind
from protocol.errors import LocalProtocolError
from tests.unit.prefilld.recorders import (
    Handler,
    accepted,
    clog,
    new_client,
    streaming_client,
    user_of,
)
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import is_closed, run, turns, until


def stop_reading(user: Recorder) -> None:
    asyncio.get_running_loop().remove_reader(user.raw)


def read_on(user: Recorder) -> None:
    asyncio.get_running_loop().add_reader(user.raw, user.socket._on_readable)


def test_a_request_then_a_cancel_are_told_as_what_they_are() -> None:
    async def scene() -> None:
        handler = Handler()
        client, theirs = new_client(handler)
        assert not client.has_asked
        user = user_of(theirs)
        user.socket.send(wire.Generate(prompt=[1]))
        user.socket.send(wire.Cancel())
        await until(lambda: handler.num_cancels)
        assert handler.requests == [wire.Generate(prompt=[1])]
        assert client.has_asked
        assert client.is_cancelled

    run(scene())


def test_the_last_message_arrives_whole_before_the_connection_ends() -> None:
    async def scene() -> None:
        client, user = await streaming_client(send_buffer_bytes=4_608)
        stop_reading(user)
        clog(client)
        client.finish(wire.Error(code="internal", message="over", retryable=True))
        assert client.is_open, "it waits for its reader"
        read_on(user)
        await user.until(lambda: user.closed)
        assert isinstance(user.messages[-1], wire.Error)
        assert not client.is_open

    run(scene())


def test_what_is_sent_to_a_client_that_is_gone_is_dropped() -> None:
    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        user.socket.close()
        await until(lambda: handler.gone)
        client.send(wire.Tokens(index=0, ids=[1], text="x"))
        client.finish(wire.Error(code="internal", message="over", retryable=True))
        assert [reason.kind for reason in handler.gone] == [CloseKind.GONE]
        assert not client.is_open

    run(scene())


def test_a_larger_request_than_is_taken_is_refused_with_its_code() -> None:
    async def scene() -> None:
        handler = Handler()
        client, theirs = new_client(handler)
        user = user_of(theirs)
        user.raw.send((5 << 20).to_bytes(4, "big"))
        message = await user.until_received(wire.Error)
        assert isinstance(message, wire.Error)
        assert message.code == "frame-too-large"
        assert [reason.kind for reason in handler.gone] == [CloseKind.PROTOCOL]
        assert not client.is_open

    run(scene())


def test_flushing_is_told_once_a_slow_client_has_taken_everything() -> None:
    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler, send_buffer_bytes=4_608)
        stop_reading(user)
        clog(client)
        assert handler.num_flushed == 0
        read_on(user)
        await until(lambda: handler.num_flushed == 1)
        assert client.is_flushed

    run(scene())


def test_a_client_that_dies_with_bytes_unread_on_both_sides_is_gone() -> None:
    """Its unread bytes are an error on our socket, ours are in front of the end of the stream."""

    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        stop_reading(user)
        client.send(wire.Tokens(index=0, ids=[1], text="x"))
        user.raw.send(b"\x00\x00")
        user.raw.close()
        await turns(200)
        assert handler.gone

    run(scene())


# --- stalls ----------------------------------------------------------------------------------


def test_a_client_that_asks_nothing_stalls() -> None:
    """It takes a descriptor from those who would ask."""

    async def scene() -> None:
        client, _ = new_client(Handler(), now_s=100)
        assert not client.is_stalled(109.9, 10)
        assert client.is_stalled(110, 10)

    run(scene())


def test_a_client_that_waits_for_its_turn_never_stalls() -> None:
    async def scene() -> None:
        client, _ = await streaming_client()
        assert not client.is_stalled(1e6, 10)

    run(scene())


def test_a_client_that_takes_nothing_stalls_and_each_byte_taken_counts() -> None:
    async def scene() -> None:
        client, user = await streaming_client(send_buffer_bytes=4_608)
        stop_reading(user)
        client.send(wire.Tokens(index=0, ids=[1], text="x" * 1_000_000))
        assert not client.is_stalled(100, 10), "it has just taken some"
        assert not client.is_stalled(109, 10)
        sent = client._socket.num_sent_bytes
        while client._socket.num_sent_bytes == sent:
            user.raw.recv(4_096)
            await asyncio.sleep(0)
        assert not client.is_stalled(111, 10)
        assert not client.is_stalled(120.9, 10)
        assert client.is_stalled(121, 10)

    run(scene())


def test_a_connection_on_its_way_to_decoded_never_stalls() -> None:
    """Nothing is ours to write there."""

    async def scene() -> None:
        client, _ = await streaming_client()
        client.detach()
        assert not client.is_stalled(1e6, 10)
        client.drop_duplicate()

    run(scene())


# --- the hand-over ---------------------------------------------------------------------------


def test_a_detached_connection_is_neither_read_nor_written() -> None:
    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        detached = client.detach()
        user.socket.send(wire.Cancel())
        client.send(wire.Tokens(index=0, ids=[1], text="x"))
        client.finish(wire.Error(code="internal", message="over", retryable=True))
        await turns()
        assert (handler.num_cancels, handler.gone) == (0, [])
        assert [type(message) for message in user.messages] == [wire.Accepted]
        assert not client.is_flushed
        assert detached.residue == b""
        client.drop_duplicate()

    run(scene())


def test_a_connection_with_bytes_still_to_send_cannot_be_detached() -> None:
    """Decoded would overtake them."""

    async def scene() -> None:
        client, user = await streaming_client(send_buffer_bytes=4_608)
        stop_reading(user)
        clog(client)
        with pytest.raises(LocalProtocolError, match="cannot be handed off"):
            client.detach()
        assert client.is_open

    run(scene())


def test_a_connection_that_came_back_is_read_where_it_was_left() -> None:
    """Half a CANCEL was read before, the other half came while nobody read."""

    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        frame = user.socket.connection.send(wire.Cancel())
        user.raw.send(frame[:5])
        await turns()
        assert client.detach().residue == frame[:5]
        user.raw.send(frame[5:])
        await turns()
        assert handler.num_cancels == 0
        client.take_back()
        await until(lambda: handler.num_cancels)
        client.send(wire.Tokens(index=0, ids=[1], text="x"))
        await user.until_received(wire.Tokens)

    run(scene())


def test_a_client_that_left_meanwhile_is_gone_once_it_came_back() -> None:
    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        client.detach()
        user.socket.close()
        await turns()
        assert handler.gone == []
        client.take_back()
        await until(lambda: handler.gone)

    run(scene())


@pytest.mark.parametrize("by_close", [False, True])
def test_a_dropped_duplicate_leaves_the_connection_to_its_new_owner(*, by_close: bool) -> None:
    """`shutdown` would end it for decoded, too."""

    async def scene() -> None:
        client, user = await streaming_client()
        sock = client.detach().socket
        fd = sock.fileno()
        with sock.dup() as at_decoded:
            if by_close:
                client.close()
            else:
                client.drop_duplicate()
            assert is_closed(fd)
            at_decoded.send(user.socket.connection.send(wire.Cancel()))  # bytes, whatever they say
            await user.until(lambda: user.closed)
            assert user.closed[0].kind is CloseKind.PROTOCOL, "the bytes arrived"

    run(scene())


def test_a_closed_client_is_told_as_gone_once() -> None:
    async def scene() -> None:
        handler = Handler()
        client, user = await streaming_client(handler)
        client.close()
        client.close()
        await user.until(lambda: user.closed)
        assert [reason.kind for reason in handler.gone] == [CloseKind.LOCAL]

    run(scene())


def test_an_answer_cannot_follow_before_it_was_accepted() -> None:
    async def scene() -> None:
        client, theirs = new_client(Handler())
        user = user_of(theirs)
        with pytest.raises(LocalProtocolError, match="accepted may not be sent"):
            client.send(accepted())
        assert user.messages == []

    run(scene())
