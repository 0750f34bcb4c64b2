"""The frame writer: order, bounds, callbacks, and the kernel's passing refusals."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from protocol.closing import CloseKind, CloseReason
from protocol.descriptors import close_all, received_rights
from protocol.errors import ConnectionLostError
from protocol.writer import FrameWriter
from tests.unit.protocol.conftest import Run
from tests.unit.protocol.recorder import fill, socketpair


class Owner:
    """Owns a writer on one end of a socket pair."""

    def __init__(self, max_queue_bytes: int = 1 << 20) -> None:
        self.near, self.far = socketpair(4608)
        self.lost: list[CloseReason] = []
        self.num_flushed = 0
        self.flushed = asyncio.Event()
        self.writer = FrameWriter(
            self.near,
            loop=asyncio.get_running_loop(),
            max_queue_bytes=max_queue_bytes,
            on_lost=self.lost.append,
            on_flushed=self._on_flushed,
        )

    def _on_flushed(self) -> None:
        self.num_flushed += 1
        self.flushed.set()

    def read_all(self) -> bytes:
        data = b""
        while True:
            try:
                data += self.far.recv(65_536)
            except BlockingIOError:
                return data

    def close(self) -> None:
        self.writer.stop()
        self.near.close()
        self.far.close()


def test_what_fits_is_written_at_once(run: Run) -> None:
    """No turn of the loop stands between a token and its client."""

    async def scenario() -> None:
        owner = Owner()
        sent: list[str] = []
        owner.writer.write(b"abc", on_sent=lambda: sent.append("abc"))
        assert (owner.read_all(), sent, owner.num_flushed) == (b"abc", ["abc"], 0)
        await owner.writer.flush()
        owner.close()

    run(scenario())


def test_what_does_not_fit_follows_in_order(run: Run) -> None:
    """And `on_flushed` tells when it is out."""

    async def scenario() -> None:
        owner = Owner()
        frames = [bytes([index]) * 5000 for index in range(8)]
        for frame in frames:
            owner.writer.write(frame)
        assert owner.writer.num_queued_bytes + owner.writer.num_sent_bytes == 40_000
        received = b""
        while not owner.flushed.is_set():
            received += owner.read_all()
            await asyncio.sleep(0)
        received += owner.read_all()
        assert received == b"".join(frames)
        assert (owner.num_flushed, owner.writer.num_queued_bytes) == (1, 0)
        owner.close()

    run(scenario())


def test_a_descriptor_goes_out_with_the_first_byte_and_never_again(run: Run) -> None:
    """A frame of many short writes carries it once, on the first of them."""

    async def scenario() -> None:
        owner = Owner()
        owner.writer.write(bytes(100_000), [owner.far.fileno()])
        reads: list[int] = []
        num_bytes = 0
        while num_bytes < 100_000:
            try:
                data, ancillary, _, _ = owner.far.recvmsg(65_536, 1024)
            except BlockingIOError:
                await asyncio.sleep(0)
                continue
            fds = received_rights(ancillary)
            close_all(fds)
            reads.append(len(fds))
            num_bytes += len(data)
        assert len(reads) > 2
        assert reads == [1] + [0] * (len(reads) - 1)
        owner.close()

    run(scenario())


def test_beyond_the_bound_everything_is_dropped_once(run: Run) -> None:
    """Half a queue is no use to a peer that will be cut off."""

    async def scenario() -> None:
        owner = Owner(max_queue_bytes=10_000)
        num_in_kernel = fill(owner.near)
        assert num_in_kernel > 0
        owner.writer.write(bytes(10_000))
        assert owner.lost == []
        owner.writer.write(b"x")
        owner.writer.write(b"x")
        assert owner.lost == [CloseReason(CloseKind.SLOW)]
        assert (owner.writer.is_open, owner.writer.num_queued_bytes) == (False, 0)
        owner.close()

    run(scenario())


@pytest.mark.parametrize("how", ["closed", "shutdown"])
def test_a_peer_that_is_gone_is_told_once(run: Run, how: str) -> None:
    """EPIPE and ECONNRESET mean the same."""

    async def scenario() -> None:
        owner = Owner()
        if how == "closed":
            owner.far.close()
        else:
            owner.far.shutdown(socket.SHUT_RD)
        owner.writer.write(b"x")
        owner.writer.write(b"x")
        (reason,) = owner.lost
        assert reason.kind is CloseKind.GONE
        assert isinstance(reason.error, OSError)
        owner.close()

    run(scenario())


def test_flush_fails_when_the_bytes_cannot_leave_any_more(run: Run) -> None:
    """Whoever waits is told, and so is whoever asks later."""

    async def scenario() -> None:
        owner = Owner()
        fill(owner.near)
        owner.writer.write(b"x")
        waiting = asyncio.ensure_future(owner.writer.flush())
        await asyncio.sleep(0)
        owner.writer.stop()
        with pytest.raises(ConnectionLostError, match="before everything was written"):
            await waiting
        with pytest.raises(ConnectionLostError, match="before everything was written"):
            await owner.writer.flush()
        owner.close()

    run(scenario())


def test_too_many_descriptors_under_way_is_a_matter_of_time(run: Run) -> None:
    """ETOOMANYREFS passes when the peer reads; the frame and its descriptor go then."""

    class Refusing:
        """A socket whose first writes the kernel refuses, as it does to users without root."""

        def __init__(self, sock: socket.socket, refusals: list[int]) -> None:
            self._socket, self._refusals = sock, refusals

        def sendmsg(
            self, buffers: list[memoryview], ancillary: list[tuple[int, int, object]]
        ) -> int:
            if self._refusals:
                number = self._refusals.pop()
                raise OSError(number, os.strerror(number))
            return self._socket.sendmsg(buffers, ancillary)  # type: ignore[arg-type]

    async def scenario() -> None:
        owner = Owner()
        refusals = [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS]
        owner.writer._socket = Refusing(owner.near, refusals)  # type: ignore[assignment]
        owner.writer.write(b"abc", [owner.far.fileno()])
        assert owner.writer.num_sent_bytes == 0
        await owner.flushed.wait()
        data, ancillary, _, _ = owner.far.recvmsg(16, 64)
        assert (data, len(ancillary), owner.lost) == (b"abc", 1, [])
        os.close(int.from_bytes(ancillary[0][2], "little"))
        owner.close()

    run(scenario())


def test_any_other_refusal_is_a_fault(run: Run) -> None:
    """A descriptor that was closed too early is our bug, and ends the connection loudly."""

    async def scenario() -> None:
        owner = Owner()
        closed = os.dup(0)
        os.close(closed)
        owner.writer.write(b"x", [closed])
        (reason,) = owner.lost
        assert reason.kind is CloseKind.FAULT
        assert isinstance(reason.error, OSError)
        assert reason.error.errno == errno.EBADF
        owner.close()

    run(scenario())
