"""A client's connection once it is decoded's: tokens out, CANCEL and the end of the stream in.

Nothing is written and nothing is read before `activate`: until the whole ADOPT was accepted by the
kernel the connection may still be prefilld's.  What a slow client has not taken coalesces into one
pending run of tokens (several, where log-probabilities would make one too large for a frame), so a
stream costs at most one answer of memory and never holds up a step.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from typing import TYPE_CHECKING

from protocol import messages as wire
from protocol.connection import Connection
from protocol.limits import MAX_LOGPROBS_PER_FRAME
from protocol.sockets import MessageSocket
from protocol.states import Role

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from protocol.closing import CloseReason
    from shared.model.answer import Piece


class ClientStream:
    """One handed-over connection.

    Args:
        descriptor: The connection, owned from here on; None where it was lost on its way, and
            then the stream can only be abandoned.
        residue: Client bytes that prefilld had read and not parsed.
        is_streaming: False sends all tokens together, right before END.
        on_cancel: Called when the client sends CANCEL.
        on_closed: Called once when the connection has ended, by whom ever.
        now_s: The monotonic time.
    """

    def __init__(
        self,
        descriptor: int | None,
        *,
        residue: bytes,
        is_streaming: bool,
        loop: asyncio.AbstractEventLoop,
        on_cancel: Callable[[], None],
        on_closed: Callable[[], None],
        now_s: float,
    ) -> None:
        self._descriptor, self._loop = descriptor, loop
        self._connection = Connection(Role.DECODED_MIGRATED)
        self._connection.receive_data(residue)
        self._socket: MessageSocket | None = None
        """Once the connection is ours."""
        self._is_streaming = is_streaming
        self._on_cancel, self._on_closed = on_cancel, on_closed
        self._is_closed = False
        self._pending: deque[wire.Tokens] = deque()
        self._last: wire.Message | None = None
        """END or ERROR, from when it is known until it is sent."""
        self._is_finished = False
        self._progress_bytes, self._progress_s = 0, now_s

    @property
    def is_active(self) -> bool:
        """Whether the connection was ever ours to write to."""
        return self._socket is not None

    @property
    def is_closed(self) -> bool:
        """Whether the connection has ended."""
        return self._is_closed

    @property
    def unsent_since_s(self) -> float | None:
        """Since when the client has taken no byte of what waits for it; None where nothing does."""
        if self._socket is None or self._socket.is_flushed:
            return None
        return self._progress_s

    def activate(self) -> None:
        """The connection is ours: read it, and send what is pending."""
        if self._descriptor is None or self._is_closed:
            return
        raw, self._descriptor = socket.socket(fileno=self._descriptor), None
        raw.setblocking(False)
        self._socket = MessageSocket(raw, self._connection, loop=self._loop)
        self._socket.start(self._on_message, self._on_socket_closed, self._pump)
        self._pump()

    def abandon(self) -> None:
        """The connection is not ours after all: close this descriptor, unread and unwritten."""
        self._is_closed = True
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def push(self, piece: Piece, logprobs: list[wire.TokenLogprob] | None = None) -> None:
        """Send a run of the answer, or keep it until the client has taken what came before.

        Args:
            piece: The run; an empty one is nothing.
            logprobs: One for each of its ids, where the request asked.
        """
        if not piece.ids and not piece.text:
            return
        run = wire.Tokens(index=piece.index, ids=piece.ids, text=piece.text, logprobs=logprobs)
        if self._pending and (joined := _join(self._pending[-1], run)) is not None:
            self._pending[-1] = joined
        else:
            self._pending.append(run)
        self._pump()

    def finish(self, message: wire.End | wire.Error) -> None:
        """Send the last message behind everything that is pending, and close."""
        if not self._is_finished:
            self._is_finished, self._last = True, message
            self._pump()

    def close(self) -> None:
        """Close at once, whatever is pending."""
        if self._socket is not None:
            self._socket.close()
        else:
            self.abandon()

    def is_stalled(self, now_s: float, timeout_s: float) -> bool:
        """Whether the client has taken no byte for `timeout_s` although some wait for it."""
        if self._socket is None:
            return False  # the link that has to carry ADOPT first has a deadline of its own
        sent = self._socket.num_sent_bytes
        if sent != self._progress_bytes or self._socket.is_flushed:
            self._progress_bytes, self._progress_s = sent, now_s
        return now_s - self._progress_s >= timeout_s

    def _pump(self) -> None:
        """Send what may leave now; called again whenever the client has taken everything."""
        if self._socket is None:
            return
        is_due = self._is_streaming or self._is_finished
        while is_due and self._pending and self._can_send:
            self._socket.send(self._pending.popleft())
        if self._last is not None and not self._pending and self._socket.is_open:
            last, self._last = self._last, None
            self._socket.send(last)
            self._socket.close_when_flushed()

    @property
    def _can_send(self) -> bool:
        """Whether the client has taken everything and is still there."""
        return self._socket is not None and self._socket.is_open and self._socket.is_flushed

    def _on_message(self, _message: wire.Message, _fds: list[int] | None) -> None:
        self._on_cancel()  # CANCEL is all that may arrive

    def _on_socket_closed(self, _reason: CloseReason) -> None:
        self._is_closed = True
        self._on_closed()


def _join(held: wire.Tokens, run: wire.Tokens) -> wire.Tokens | None:
    """Return both runs as one; None where they would be too much for a frame."""
    logprobs = None
    if held.logprobs is not None and run.logprobs is not None:
        if len(held.ids) + len(run.ids) > MAX_LOGPROBS_PER_FRAME:
            return None
        logprobs = [*held.logprobs, *run.logprobs]
    return wire.Tokens(
        index=held.index,
        ids=[*held.ids, *run.ids],
        text=held.text + run.text,
        logprobs=logprobs,
    )
