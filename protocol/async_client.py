"""The client for asyncio and uvloop: the same requests and events as `client.py`, awaited.

    client = AsyncClient("/run/kvpair/prefilld.sock")
    async with await client.stream("Why is the sky blue?", max_tokens=64) as stream:
        async for event in stream:
            ...                      # Accepted, Tokens, …, End; await stream.cancel() ends it early

A cancelled wait loses nothing: bytes are only taken from the socket together with their use.
"""

from __future__ import annotations

import asyncio
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
    from collections.abc import Awaitable, Callable
    from pathlib import Path
    from types import TracebackType

_ReplyT = TypeVar("_ReplyT", bound=Message)


class AsyncClient:
    """Asks one daemon, one connection a question.  Arguments and errors are `Client`'s."""

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

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncAnswerStream:
        """Send a request; return its answer as it comes."""
        resumption = Resumption(request_message(Generate, prompt, options), self._policy)
        call = await self._call(resumption.next_exchange())
        return AsyncAnswerStream(call, self._call, resumption)

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Answer:
        """Return the whole answer."""
        # Not the loop's clock: uvloop's stands still within a turn, and counts whole milliseconds.
        builder = AnswerBuilder(began_s=time.monotonic())
        async with await self.stream(prompt, **options) as stream:
            async for event in stream:
                builder.add(event, now_s=time.monotonic())
        return builder.finish()

    async def check(self, prompt: Prompt, **options: Unpack[Options]) -> Checked:
        """Judge a request without running it."""
        return await self._ask(request_message(Check, prompt, options), Checked)

    async def status(self) -> dict[str, object]:
        """Return the daemon's state."""
        return (await self._ask(StatusRequest(), Status)).status

    async def metrics(self) -> str:
        """Return the daemon's metrics as Prometheus text."""
        return (await self._ask(MetricsRequest(), Metrics)).text

    async def _ask(self, question: Message, kind: type[_ReplyT]) -> _ReplyT:
        call = await self._call(Exchange(question))
        try:
            reply = await call.next_event()
        finally:
            call.close()
        assert isinstance(reply, kind)  # the state table lets no other one through
        return reply

    async def _call(self, exchange: Exchange) -> _Call:
        frame = exchange.begin()
        call = _Call(await self._connect(), exchange, timeout_s=self._timeout_s)
        try:
            await call.write(frame)
        except BaseException:
            call.close()
            raise
        return call

    async def _connect(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._connect_timeout_s
        while True:
            try:
                return connect_unix(self._path)
            except ListenQueueFullError:
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(CONNECT_RETRY_S)


class _Call:
    """One exchange on one non-blocking socket."""

    def __init__(self, sock: socket.socket, exchange: Exchange, *, timeout_s: float | None) -> None:
        self._socket, self._exchange, self._timeout_s = sock, exchange, timeout_s

    async def write(self, frame: bytes) -> None:
        """Send a frame.  A daemon that hung up may have said why, so reading tells the rest."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(BrokenPipeError, ConnectionResetError):
                    await loop.sock_sendall(self._socket, frame)
        except TimeoutError as error:
            raise self._silent() from error

    async def cancel(self) -> None:
        """Send CANCEL where there is something to cancel."""
        if frame := self._exchange.cancel():
            await self.write(frame)

    async def next_event(self) -> Message:
        """Return the answer's next message."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while (event := self._exchange.next_event()) is None:
                    await self._read()
        except TimeoutError as error:
            raise self._silent() from error
        return event

    async def _read(self) -> None:
        """Wait until bytes are there, then take them; nothing can come between the two."""
        try:
            data = self._socket.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            await self._wait_readable()
            return
        except ConnectionResetError:
            data = b""
        self._exchange.receive_data(data)

    async def _wait_readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._socket, _wake, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._socket)

    def _silent(self) -> DeadlineError:
        return DeadlineError(f"the daemon was silent for {self._timeout_s:g} s")

    def close(self) -> None:
        """Close the socket; to the daemon that is a cancel."""
        self._socket.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class AsyncAnswerStream:
    """An answer as it comes: iterate over it, cancel it, close it.

    Args:
        call: The first connection, over which the request was sent.
        dial: Makes another one and sends an exchange's request.
        resumption: What is asked, and what to do when it breaks off.
    """

    def __init__(
        self,
        call: _Call,
        dial: Callable[[Exchange], Awaitable[_Call]],
        resumption: Resumption,
    ) -> None:
        self._call: _Call | None = call
        """None between a loss and the next connection."""
        self._dial, self._resumption = dial, resumption
        self._dial_at_s = 0.0
        self._cancelled = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> AsyncAnswerStream:
        return self

    async def __anext__(self) -> Event:
        """Return the next event; raises as `AnswerStream.__next__`."""
        while not self._is_over:
            try:
                call = await self._connected()
                event = self._resumption.take(await call.next_event())
            except (ProtocolError, RequestError) as error:
                self._mend(error)
                continue
            if isinstance(event, End):
                self.close()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def cancel(self) -> None:
        """Ask the daemon to stop; go on iterating, END with reason `cancelled` follows.

        An answer that breaks off after this is not resumed: the loss is raised.
        """
        self._resumption.is_cancelled = True
        self._cancelled.set()
        if not self._is_over and self._call is not None:
            await self._call.cancel()

    def close(self) -> None:
        """Close the connection, whatever is still to come.  Safe to repeat."""
        self._is_over = True
        self._hang_up()

    async def _connected(self) -> _Call:
        """Return the connection; after a loss a new one, once its time has come."""
        if self._call is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._dial_at_s - time.monotonic())):
                    await self._cancelled.wait()
            if self._cancelled.is_set():
                raise self._resumption.lost("it was cancelled")
            self._call = await self._dial(self._resumption.next_exchange())
            if self._cancelled.is_set():  # while the connection was being made
                await self._call.cancel()
        return self._call

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

    async def __aenter__(self) -> AsyncAnswerStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
