"""The blocking client: one socket a request, no event loop, quick to import.

    client = Client("/run/kvpair/prefilld.sock")
    with client.stream("Why is the sky blue?", max_tokens=64) as stream:
        for event in stream:
            ...                      # Accepted, Tokens, …, End; stream.cancel() ends it early

Every wait has a deadline.  A stream that is closed before END is cancelled: the daemon sees the
connection end.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, Unpack

from protocol.errors import DeadlineError, ListenQueueFullError, ProtocolError, RequestError
from protocol.exchange import (
    CONNECT_RETRY_S,
    DEFAULT_CONNECT_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    READ_BYTES,
    Answer,
    AnswerBuilder,
    Event,
    Exchange,
    Options,
    Prompt,
    request_message,
)
from protocol.messages import (
    Accepted,
    Check,
    Checked,
    End,
    Generate,
    Message,
    Metrics,
    MetricsRequest,
    Status,
    StatusRequest,
    Tokens,
)
from protocol.unix import connect_unix

if TYPE_CHECKING:
    import socket
    from pathlib import Path
    from types import TracebackType

_ReplyT = TypeVar("_ReplyT", bound=Message)


class Client:
    """Asks one daemon, one connection a question.

    Args:
        socket_path: prefilld's socket; decoded's answers `status` and `metrics` only.
        connect_timeout_s: How long to try while the daemon's queue of connections is full.
        timeout_s: Longest silence between two messages; None waits for ever.
    """

    def __init__(
        self,
        socket_path: str | Path,
        *,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._path = str(socket_path)
        self._connect_timeout_s, self._timeout_s = connect_timeout_s, timeout_s

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AnswerStream:
        """Send a request; return its answer as it comes.

        Raises:
            RequestError: The request is wrong in itself.
            UnixSocketError: The daemon cannot be reached; the subclass and text say why.
        """
        return AnswerStream(self._call(request_message(Generate, prompt, options)))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer; raises what `stream` and its iteration raise."""
        builder = AnswerBuilder(began_s=time.monotonic())
        with self.stream(prompt, **options) as stream:
            for event in stream:
                builder.add(event, now_s=time.monotonic())
        return builder.finish()

    def check(self, prompt: Prompt, **options: Unpack[Options]) -> Checked:
        """Judge a request without running it."""
        return self._ask(request_message(Check, prompt, options), Checked)

    def status(self) -> dict[str, object]:
        """Return the daemon's state."""
        return self._ask(StatusRequest(), Status).status

    def metrics(self) -> str:
        """Return the daemon's metrics as Prometheus text."""
        return self._ask(MetricsRequest(), Metrics).text

    def _ask(self, question: Message, kind: type[_ReplyT]) -> _ReplyT:
        call = self._call(question)
        try:
            reply = call.next_event()
        finally:
            call.close()
        assert isinstance(reply, kind)  # the state table lets no other one through
        return reply

    def _call(self, request: Message) -> _Call:
        exchange = Exchange(request)
        frame = exchange.begin()
        call = _Call(self._connect(), exchange, timeout_s=self._timeout_s)
        try:
            call.write(frame)
        except BaseException:
            call.close()
            raise
        return call

    def _connect(self) -> socket.socket:
        deadline_s = time.monotonic() + self._connect_timeout_s
        while True:
            try:
                return connect_unix(self._path)
            except ListenQueueFullError:
                if time.monotonic() >= deadline_s:
                    raise
            time.sleep(CONNECT_RETRY_S)


class _Call:
    """One exchange on one blocking socket."""

    def __init__(self, sock: socket.socket, exchange: Exchange, *, timeout_s: float | None) -> None:
        self._socket, self._exchange, self._timeout_s = sock, exchange, timeout_s

    def write(self, frame: bytes) -> None:
        """Send a frame.  A daemon that hung up may have said why, so reading tells the rest."""
        self._socket.settimeout(self._timeout_s)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(frame)
        except TimeoutError as error:
            raise _silent(self._timeout_s) from error

    def cancel(self) -> None:
        """Send CANCEL where there is something to cancel."""
        if frame := self._exchange.cancel():
            self.write(frame)

    def next_event(self) -> Message:
        """Return the answer's next message."""
        deadline_s = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while True:
            event = self._exchange.next_event()
            if event is not None:
                return event
            if deadline_s is not None:
                # Zero would mean non-blocking; a microsecond is over soon enough.
                self._socket.settimeout(max(deadline_s - time.monotonic(), 1e-6))
            self._exchange.receive_data(self._read())

    def _read(self) -> bytes:
        try:
            return self._socket.recv(READ_BYTES)
        except ConnectionResetError:
            return b""
        except TimeoutError as error:
            raise _silent(self._timeout_s) from error

    def close(self) -> None:
        """Close the socket; to the daemon that is a cancel."""
        self._socket.close()


def _silent(timeout_s: float | None) -> DeadlineError:
    return DeadlineError(f"the daemon was silent for {timeout_s:g} s")


class AnswerStream:
    """An answer as it comes: iterate over it, cancel it, close it.

    An interrupt (Ctrl-C) while iterating leaves the stream whole: `cancel` and iterate on to END.
    """

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._is_over = False

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Event:
        """Return the next event.

        Raises:
            StopIteration: END was returned, or the stream was closed.
            RequestError: The daemon answered with ERROR.
            ConnectionLostError: The daemon went away before END.
            DeadlineError: The daemon was silent for too long.
            RemoteProtocolError: The daemon broke the rules.
        """
        if self._is_over:
            raise StopIteration
        try:
            event = self._call.next_event()
        except (ProtocolError, RequestError):
            self.close()
            raise
        assert isinstance(event, Accepted | Tokens | End)  # the state table lets no other through
        if isinstance(event, End):
            self.close()
        return event

    def cancel(self) -> None:
        """Ask the daemon to stop; go on iterating, END with reason `cancelled` follows."""
        if not self._is_over:
            self._call.cancel()

    def close(self) -> None:
        """Close the connection, whatever is still to come.  Safe to repeat."""
        self._is_over = True
        self._call.close()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
