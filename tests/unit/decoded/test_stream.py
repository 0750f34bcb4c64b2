"""A client's connection once it is decoded's: silent until it is, then never in anybody's way."""

from __future__ import annotations

import asyncio
import os

import pytest

from decoded.stream import ClientStream
from protocol import messages as wire
from protocol.codec import encode_message
from shared.model.answer import Piece
from tests.unit.decoded.samples import Stream
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import is_closed, run, turns, until

END = wire.End(
    reason="length",
    usage=wire.Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
    timings_ms=wire.Timings(queue=0, prefill=0, decode=0, total=0),
)


def piece(index: int, text: str = "x") -> Piece:
    return Piece(index, [index], text, None)


def tokens(user: Recorder) -> list[wire.Tokens]:
    return [message for message in user.messages if isinstance(message, wire.Tokens)]


# --- before it is ours -----------------------------------------------------------------------


def test_no_byte_is_written_before_the_connection_is_ours() -> None:
    """Until ADOPT is with the kernel, prefilld may still take it back and write itself."""

    async def scene() -> None:
        case = Stream()
        case.stream.push(piece(0))
        case.stream.finish(END)
        await turns()
        assert not case.stream.is_active
        with pytest.raises(BlockingIOError):
            case.theirs.recv(1)
        user = case.user()
        case.stream.activate()
        await user.until_received(wire.End)
        assert user.messages == [wire.Tokens(index=0, ids=[0], text="x"), END]

    run(scene())


def test_no_byte_is_read_before_the_connection_is_ours() -> None:
    """It would be missing when prefilld reads on."""

    async def scene() -> None:
        case = Stream()
        case.theirs.send(encode_message(wire.Cancel()))
        await turns()
        assert case.num_cancels == 0
        case.stream.activate()
        await until(lambda: case.num_cancels == 1)
        case.stream.close()

    run(scene())


def test_an_abandoned_connection_is_left_as_it_was() -> None:
    """Prefilld has a duplicate: neither `shutdown` nor a byte may tell the client anything."""

    async def scene() -> None:
        case = Stream()
        with_prefilld = os.dup(case.fd)
        case.stream.push(piece(0))
        case.stream.abandon()
        assert case.stream.is_closed
        assert is_closed(case.fd)
        await turns()
        with pytest.raises(BlockingIOError):
            case.theirs.recv(1)
        case.stream.activate()
        assert not case.stream.is_active
        os.close(with_prefilld)

    run(scene())


def test_closing_a_connection_that_is_not_ours_abandons_it() -> None:
    async def scene() -> None:
        case = Stream()
        case.stream.close()
        assert case.stream.is_closed
        assert is_closed(case.fd)
        case.stream.abandon()

    run(scene())


def test_a_connection_that_never_arrived_can_only_be_abandoned() -> None:
    async def scene() -> None:
        stream = ClientStream(
            None,
            residue=b"",
            is_streaming=True,
            loop=asyncio.get_running_loop(),
            on_cancel=lambda: None,
            on_closed=lambda: None,
            now_s=0,
        )
        stream.push(piece(0))
        stream.activate()
        assert not stream.is_active
        stream.abandon()
        assert stream.is_closed

    run(scene())


# --- residue ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", range(len(encode_message(wire.Cancel())) + 1))
def test_what_prefilld_had_read_comes_before_what_is_read_now(cut: int) -> None:
    """A CANCEL that was cut anywhere by the hand-over is still one CANCEL."""
    frame = encode_message(wire.Cancel())

    async def scene() -> None:
        case = Stream(residue=frame[:cut])
        if frame[cut:]:
            case.theirs.send(frame[cut:])
        case.stream.activate()
        await until(lambda: case.num_cancels == 1)
        await turns(5)
        assert case.num_cancels == 1
        case.stream.close()

    run(scene())


def test_bytes_that_are_no_cancel_end_the_connection_with_their_fault() -> None:
    async def scene() -> None:
        case = Stream(residue=encode_message(wire.StatusRequest()))
        user = case.user()
        case.stream.activate()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert error.code == "unexpected-message"
        assert (case.num_closed, case.num_cancels) == (1, 0)

    run(scene())


# --- tokens ----------------------------------------------------------------------------------


def test_tokens_leave_at_once_while_the_client_takes_them() -> None:
    async def scene() -> None:
        case = Stream()
        user = case.user()
        case.stream.activate()
        for index in range(3):
            case.stream.push(piece(index))
        await user.until(lambda: len(tokens(user)) == 3)
        case.stream.close()

    run(scene())


def test_a_piece_of_nothing_is_not_sent() -> None:
    async def scene() -> None:
        case = Stream()
        user = case.user()
        case.stream.activate()
        case.stream.push(Piece(0, [], "", None))
        case.stream.push(piece(0))
        await user.until_received(wire.Tokens)
        assert len(user.messages) == 1
        case.stream.close()

    run(scene())


def test_what_a_slow_client_has_not_taken_becomes_one_frame() -> None:
    """So a stream costs one answer of memory, and its reader catches up in one step."""

    async def scene() -> None:
        case = Stream(send_buffer_bytes=4_608)
        case.stream.activate()
        case.stream.push(piece(0, "y" * 100_000))  # more than the kernel takes
        for index in range(1, 50):
            case.stream.push(piece(index))
        await turns()
        user = case.user()
        await user.until(lambda: len(tokens(user)) == 2)
        first, rest = tokens(user)
        assert first.ids == [0]
        assert (rest.index, rest.ids, rest.text) == (1, list(range(1, 50)), "x" * 49)
        case.stream.push(piece(50))
        await user.until(lambda: len(tokens(user)) == 3)
        case.stream.close()

    run(scene())


def test_the_last_message_follows_everything_that_was_pending() -> None:
    async def scene() -> None:
        case = Stream(send_buffer_bytes=4_608)
        case.stream.activate()
        case.stream.push(piece(0, "y" * 100_000))
        case.stream.push(piece(1))
        case.stream.finish(END)
        case.stream.finish(wire.Error(code="internal", message="twice", retryable=True))
        assert not case.stream.is_closed
        user = case.user()
        await user.until(lambda: user.closed)
        assert [type(message) for message in user.messages] == [wire.Tokens, wire.Tokens, wire.End]
        await until(lambda: case.num_closed)
        assert case.stream.is_closed

    run(scene())


def test_an_unstreamed_answer_is_one_frame_before_its_end() -> None:
    async def scene() -> None:
        case = Stream(is_streaming=False)
        user = case.user()
        case.stream.activate()
        for index in range(5):
            case.stream.push(piece(index))
        await turns()
        assert user.messages == []
        case.stream.finish(END)
        await user.until_received(wire.End)
        assert user.messages == [wire.Tokens(index=0, ids=[0, 1, 2, 3, 4], text="xxxxx"), END]

    run(scene())


def test_a_client_that_leaves_is_told_of_once() -> None:
    async def scene() -> None:
        case = Stream()
        case.stream.activate()
        case.theirs.close()
        await until(lambda: case.num_closed == 1)
        case.stream.push(piece(0))
        case.stream.finish(END)
        case.stream.close()
        await turns()
        assert (case.num_closed, case.stream.is_closed) == (1, True)

    run(scene())


def test_closing_drops_what_is_pending() -> None:
    async def scene() -> None:
        case = Stream(send_buffer_bytes=4_608)
        case.stream.activate()
        case.stream.push(piece(0, "y" * 100_000))
        case.stream.close()
        assert case.num_closed == 1
        user = case.user()
        await user.until(lambda: user.closed)
        assert user.messages == []

    run(scene())


# --- stalls ----------------------------------------------------------------------------------


def test_a_client_that_takes_nothing_although_bytes_wait_stalls() -> None:
    async def scene() -> None:
        case = Stream(send_buffer_bytes=4_608)
        case.stream.activate()
        case.stream.push(piece(0, "y" * 1_000_000))
        assert not case.stream.is_stalled(100, 10)
        assert not case.stream.is_stalled(109.9, 10)
        assert case.stream.is_stalled(110, 10)
        assert case.stream._socket is not None
        sent = case.stream._socket.num_sent_bytes
        while case.stream._socket.num_sent_bytes == sent:
            case.theirs.recv(1 << 16)
            await asyncio.sleep(0)
        assert not case.stream.is_stalled(115, 10), "it has taken some"
        assert case.stream.is_stalled(125, 10)
        case.stream.close()

    run(scene())


def test_a_client_for_whom_nothing_waits_never_stalls() -> None:
    """It is the batch that is slow."""

    async def scene() -> None:
        case = Stream()
        case.stream.activate()
        assert not case.stream.is_stalled(1e6, 10)
        case.stream.close()

    run(scene())


def test_a_connection_that_is_not_ours_yet_never_stalls() -> None:
    """The link that has to carry ADOPT first has a deadline of its own."""

    async def scene() -> None:
        case = Stream()
        case.stream.push(piece(0))
        assert not case.stream.is_stalled(1e6, 10)
        case.stream.abandon()

    run(scene())


# --- log-probabilities -----------------------------------------------------------------------


def test_probabilities_coalesce_with_their_ids_up_to_a_frame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame that is too large for the protocol would cost the client its whole answer."""
    monkeypatch.setattr("decoded.stream.MAX_LOGPROBS_PER_FRAME", 3)

    async def scene() -> None:
        case = Stream(is_streaming=False)
        likely = [
            wire.TokenLogprob(logprob=-float(index), top_ids=[], top_logprobs=[])
            for index in range(7)
        ]
        for index in range(7):
            case.stream.push(piece(index), [likely[index]])
        case.stream.finish(END)
        user = case.user()
        case.stream.activate()
        await user.until_received(wire.End)
        received = tokens(user)
        assert [message.ids for message in received] == [[0, 1, 2], [3, 4, 5], [6]]
        assert [entry for message in received for entry in message.logprobs or ()] == likely
        assert user.messages[-1] == END

    run(scene())
