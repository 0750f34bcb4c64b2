"""The client's side of one request, without its socket: what both clients share.

An exchange is begun with one message and ends with its answer.  It says what to write, takes what
was read, and turns ERROR frames and early ends into exceptions.  `client.py` and
`async_client.py` add a socket and deadlines, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, TypeVar

import msgspec

from protocol.codec import BUILTIN_TYPES, decode_message
from protocol.connection import Connection
from protocol.errors import (
    ConnectionLostError,
    InvalidMessageError,
    LocalProtocolError,
    RequestError,
)
from protocol.limits import MAX_ATTEMPT
from protocol.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Check,
    End,
    Error,
    Generate,
    Message,
    Resume,
    Sampling,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)
from protocol.states import SENDS, Role

DEFAULT_CONNECT_TIMEOUT_S = 5.0
"""A daemon that lives takes a connection within milliseconds, even a busy one."""

DEFAULT_TIMEOUT_S = 600.0
"""Longest silence between two messages: a request may wait its turn for minutes, not for ever."""

CONNECT_RETRY_S = 0.02
"""Pause before another try when the daemon's queue of new connections is full."""

READ_BYTES = 65_536

Prompt = str | Sequence[ChatMessage] | Sequence[int]
"""Text, chat messages, or token ids."""

Event = Accepted | Tokens | End
"""What a stream yields: ACCEPTED once, TOKENS any number of times, END last."""

_RequestT = TypeVar("_RequestT", Generate, Check)


class Options(TypedDict, total=False):
    """What a request may say beside its prompt; `messages.Generate` explains each."""

    id: str | None
    raw: bool
    max_tokens: int | None
    min_tokens: int
    sampling: Sampling
    stop: Sequence[str]
    stop_ids: Sequence[int]
    ignore_eos: bool
    stream: bool
    logprobs: int | None
    resume: Resume | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer, as one connection delivered it."""

    id: str
    seed: int
    fingerprint: str
    """Which model answered; `resume` needs it."""
    ids: tuple[int, ...]
    """Without those that came with `resume`."""
    text: str
    reason: str
    """`stop`, `length` or `cancelled`."""
    usage: Usage
    timings_ms: Timings
    ttft_ms: float | None
    """From connecting to the first TOKENS, by the client's clock; None without any."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each of `ids`, where they were asked for."""


def request_message(kind: type[_RequestT], prompt: Prompt, options: Options) -> _RequestT:
    """Return a GENERATE or CHECK, checked as the daemon will check it.

    Raises:
        RequestError: A value has a wrong type or is out of range; the code is `invalid-request`.
    """
    try:
        body = msgspec.to_builtins(
            {"type": kind.__struct_config__.tag, "prompt": prompt, **options},
            builtin_types=BUILTIN_TYPES,
        )
        _check_texts(body, str(kind.__struct_config__.tag))
        request = decode_message(body, kind)
    except (InvalidMessageError, TypeError, ValueError) as error:
        raise RequestError("invalid-request", str(error)) from error
    assert isinstance(request, kind)
    return request


def _check_texts(value: object, where: str) -> None:
    """Refuse text that UTF-8 cannot carry; JSON and file names can hold halves of characters."""
    match value:
        case str():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise InvalidMessageError(
                    f"{where}: character {error.start + 1} is half of a surrogate pair, which "
                    "UTF-8 cannot carry"
                ) from error
        case dict():
            for key, inner in value.items():
                _check_texts(inner, f"{where}.{key}")
        case [str() | dict(), *_]:  # token ids are many, and no text
            for index, inner in enumerate(value):
                _check_texts(inner, f"{where}[{index}]")


def next_attempt(before: Resume, ids: list[int]) -> Resume:
    """Return what the next request must carry to go on behind `ids`, after a request's `resume`."""
    attempt = min(before.attempt + 1, MAX_ATTEMPT)
    return msgspec.structs.replace(before, attempt=attempt, ids=ids)


class Exchange:
    """One request and its answer, bytes in and events out."""

    def __init__(self, request: Message) -> None:
        self._request = request
        self._connection = Connection(Role.CLIENT)
        self._resume = request.resume if isinstance(request, Generate) else None
        self._accepted: Accepted | None = None
        self._ids: list[int] = []

    @property
    def resume(self) -> Resume | None:
        """What a new request must carry to go on behind what was delivered, once accepted."""
        if self._accepted is None:
            return None
        before = self._resume or Resume(
            attempt=0, seed=self._accepted.seed, fingerprint=self._accepted.fingerprint, ids=[]
        )
        return next_attempt(before, [*before.ids, *self._ids])

    def begin(self) -> bytes:
        """Return the request's frame.

        Raises:
            RequestError: It has no form on the wire: text that is no Unicode, for instance.
        """
        try:
            return self._connection.send(self._request)
        except LocalProtocolError as error:
            raise RequestError("invalid-request", str(error)) from error

    def cancel(self) -> bytes:
        """Return the frame that cancels the answer; empty where there is nothing to cancel."""
        if Cancel not in SENDS[Role.CLIENT].get(self._connection.state, {}):
            return b""
        return self._connection.send(Cancel())

    def receive_data(self, data: bytes) -> None:
        """Take what was read; empty means that the daemon has said its last byte."""
        if data:
            self._connection.receive_data(data)
        else:
            self._connection.receive_eof()

    def next_event(self) -> Message | None:
        """Return the next message of the answer, or None when more must be read.

        Raises:
            RequestError: The daemon answered with ERROR.
            ConnectionLostError: The stream ended before the answer did.
            RemoteProtocolError: The daemon broke the rules.
        """
        message = self._connection.next_event()
        match message:
            case None:
                if self._connection.has_eof:
                    raise self._lost()
            case Error():
                raise RequestError(
                    message.code,
                    message.message,
                    retryable=message.retryable,
                    retry_after_ms=message.retry_after_ms,
                )
            case Accepted():
                self._accepted = message
            case Tokens():
                self._take(message)
        return message

    def _take(self, tokens: Tokens) -> None:
        num_before = (len(self._resume.ids) if self._resume else 0) + len(self._ids)
        if tokens.index != num_before:
            raise InvalidMessageError(
                f"tokens: they begin at index {tokens.index}, but {num_before} were delivered"
            )
        self._ids += tokens.ids

    def _lost(self) -> ConnectionLostError:
        num_tokens = len(self._ids)
        return ConnectionLostError(
            f"the daemon went away before the answer was whole; tokens delivered: {num_tokens}",
            num_tokens=num_tokens,
            resume=self.resume,
        )


class AnswerBuilder:
    """Folds a stream's events into an `Answer`.

    Args:
        began_s: The client's clock when it began to connect.
    """

    def __init__(self, *, began_s: float) -> None:
        self._began_s = began_s
        self._accepted: Accepted | None = None
        self._end: End | None = None
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._ttft_ms: float | None = None

    def add(self, event: Event, *, now_s: float) -> None:
        """Take the stream's next event, read from the socket at `now_s`."""
        match event:
            case Accepted():
                self._accepted = event
            case Tokens():
                if self._ttft_ms is None:
                    self._ttft_ms = (now_s - self._began_s) * 1e3
                self._ids += event.ids
                self._texts.append(event.text)
                self._logprobs += event.logprobs or ()
            case End():
                self._end = event

    def finish(self) -> Answer:
        """Return the answer; the stream has yielded END."""
        assert self._accepted is not None
        assert self._end is not None
        return Answer(
            id=self._accepted.id,
            seed=self._accepted.seed,
            fingerprint=self._accepted.fingerprint,
            ids=tuple(self._ids),
            text="".join(self._texts),
            reason=self._end.reason,
            usage=self._end.usage,
            timings_ms=self._end.timings_ms,
            ttft_ms=self._ttft_ms,
            logprobs=tuple(self._logprobs),
        )
