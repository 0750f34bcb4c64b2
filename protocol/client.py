"""The blocking client: one socket a request, no event loop, quick to import.

    client = Client("/run/kvpair/prefilld.sock")
    with client.stream("Why is the sky blue?", max_tokens=64) as stream:
        for event in stream:
            ...                      # Accepted, Tokens, …, End; stream.cancel() ends it early

Every wait has a deadline.  A stream that is closed before END is cancelled: the daemon sees the
connection end.  An answer that breaks off because a daemon died is resumed, and the stream goes on
as if nothing had happened (`resuming.py` has the rules).
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
    Check,
    Checked,
    End,
    Generate,
    Message,
    Metrics,
    MetricsRequest,
    Status,
    StatusRequest,
)
from protocol.resuming import DEFAULT_POLICY, ResumePolicy, Resumption
from protocol.unix import connect_unix

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

_ReplyT = TypeVar("_ReplyT", bound=Message)

CANCEL_POLL_S = 0.05
"""How soon `cancel` ends a pause: a signal's handler may call it, and so must not need a lock."""


class Client:
    """Asks one daemon, one connection a question.

    Args:
        socket_path: prefilld's socket; decoded's answers `status` and `metrics` only.
        connect_timeout_s: How long to try while the daemon's queue of connections is full.
        timeout_s: Longest silence between two messages; None waits for ever.
        resume_policy: What to put up with when an answer breaks off.
    """

    def __init__(
        self,
        socket_path: str | Path,
        *,
        connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        resume_policy: ResumePolicy = DEFAULT_POLICY,
    ) -> None:
        self._path = str(socket_path)
        self._connect_timeout_s, self._timeout_s = connect_timeout_s, timeout_s
        self._policy = resume_policy

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AnswerStream:
        """Send a request; return its answer as it comes.

        Raises:
            RequestError: The request is wrong in itself.
            UnixSocketError: The daemon cannot be reached; the subclass and text say why.
        """
        request = request_message(Generate, prompt, options)
        return AnswerStream(self._call, Resumption(request, self._policy))

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
        call = self._call(Exchange(question))
        try:
            reply = call.next_event()
        finally:
            call.close()
        assert isinstance(reply, kind)  # the state table lets no other one through
        return reply

    def _call(self, exchange: Exchange) -> _Call:
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

    Args:
        dial: Makes a connection and sends an exchange's request.
        resumption: What is asked, and what to do when it breaks off.
    """

    def __init__(self, dial: Callable[[Exchange], _Call], resumption: Resumption) -> None:
        self._dial, self._resumption = dial, resumption
        self._call: _Call | None = dial(resumption.next_exchange())
        """None between a loss and the next connection."""
        self._dial_at_s = 0.0
        self._is_over = False

    def __iter__(self) -> AnswerStream:
        return self

    def __next__(self) -> Event:
        """Return the next event.

        Raises:
            StopIteration: END was returned, or the stream was closed.
            RequestError: The daemon answered with ERROR.
            ConnectionLostError: The daemon went away before END, and resuming did not help.
            DeadlineError: The daemon was silent for too long.
            RemoteProtocolError: The daemon broke the rules.
        """
        while not self._is_over:
            try:
                event = self._resumption.take(self._connected().next_event())
            except (ProtocolError, RequestError) as error:
                self._mend(error)
                continue
            if isinstance(event, End):
                self.close()
            if event is not None:
                return event
        raise StopIteration

    def cancel(self) -> None:
        """Ask the daemon to stop; go on iterating, END with reason `cancelled` follows.

        An answer that breaks off after this is not resumed: the loss is raised.
        """
        self._resumption.is_cancelled = True
        if not self._is_over and self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """Close the connection, whatever is still to come.  Safe to repeat."""
        self._is_over = True
        self._hang_up()

    def _connected(self) -> _Call:
        """Return the connection; after a loss a new one, once its time has come."""
        if self._call is None:
            self._wait_to_dial()
            self._call = self._dial(self._resumption.next_exchange())
            if self._resumption.is_cancelled:  # while the connection was being made
                self._call.cancel()
        return self._call

    def _wait_to_dial(self) -> None:
        while (left_s := self._dial_at_s - time.monotonic()) > 0:
            if self._resumption.is_cancelled:
                break
            time.sleep(min(left_s, CANCEL_POLL_S))
        if self._resumption.is_cancelled:
            raise self._resumption.lost("it was cancelled")

    def _mend(self, error: ProtocolError | RequestError) -> None:
        """Have the next round connect again, or close and raise what cannot be mended."""
        self._hang_up()
        now_s = time.monotonic()
        try:
            self._dial_at_s = now_s + self._resumption.failed(error, now_s=now_s)
        except BaseException:
            self.close()
            raise

    def _hang_up(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.close()

    def __enter__(self) -> AnswerStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
