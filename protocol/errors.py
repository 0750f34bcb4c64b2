"""What can go wrong on the wire, and what the other side is told about it.

    ProtocolError                        root; has `code` and `retryable`
    ├── RemoteProtocolError              the peer broke the rules: tell it, close, live on
    │   ├── FrameTooLargeError           frame-too-large
    │   ├── MalformedFrameError          malformed-frame
    │   ├── InvalidMessageError          invalid-message
    │   ├── UnexpectedMessageError       unexpected-message
    │   ├── StaleEpochError              stale-epoch
    │   └── VersionMismatchError         version
    ├── LocalProtocolError               we broke the rules: a bug of ours
    ├── LinkRefusedError                 the hand-shake's REFUSE, with both sides' values
    ├── ConnectionLostError              the peer went away before it was done
    ├── DeadlineError                    the peer did not answer in time
    └── UnixSocketError                  a socket could not be made or reached; also an OSError
        ├── AddressInUseError            another process listens there
        ├── SocketPathError              the path cannot hold a socket
        ├── NoSuchSocketError            nothing is there: no daemon was started
        ├── NotListeningError            a socket is there and nobody listens: the daemon died
        ├── ListenQueueFullError         the daemon lives and is behind with its connections
        └── SocketForbiddenError         this user may not connect

    RequestError                         an ERROR frame as an exception: code, message, retryable

Codes are stable: programs may branch on them.  `CODES` explains each; a code used twice fails
at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from protocol.messages import Resume

CODES: dict[str, str] = {
    # a connection's fault
    "frame-too-large": "a frame announced more bytes than this connection may carry",
    "malformed-frame": "a frame's body is not one msgpack map",
    "invalid-message": "a message does not match its schema",
    "unexpected-message": "a message is legal, but not now",
    "stale-epoch": "a message names a pool incarnation that is gone",
    # a request's fault
    "invalid-request": "the request contradicts itself or the model",
    "too-large": "the request can never fit this model or these pools",
    "busy": "every queue is full; come back after `retry_after_ms`",
    "draining": "the daemon is shutting down; its successor will answer",
    "prefill-lost": "prefilld died before decoded had the prompt's blocks",
    "preempted": "decoded's pool is full, and others were there first; ask for the rest",
    "model-changed": "the resumed answer was begun by another model",
    "poisoned": "decoded died under this request too often",
    "timeout": "the request waited longer than its deadline",
    "internal": "a fault inside the daemon; its log says more",
    # a link's fault
    "link-busy": "decoded has a living link already",
    "version": "the daemons speak different protocol versions",
    "fingerprint": "the daemons serve different models or layouts",
    "backend": "one daemon's pool is a memfd, the other's is on a GPU",
    "self-connect": "a daemon connected to itself",
    "host": "the daemons run on different hosts",
    "same-pid": "both daemons see themselves under one pid, in different namespaces",
    "shm": "the daemons do not share /dev/shm",
    "credentials": "the peer's user may not use this socket",
    "size": "the pool is not as large as its owner says",
    "memory": "decoded's GPU has too little memory free to map the pool or to read it",
    "handle": "the GPU's driver does not open what should be the pool's handle",
    "peer-access": "decoded's GPU cannot read the memory of prefilld's",
    "proof": "decoded read other bytes through the mapping than prefilld wrote",
    "slow-link": "the mapping is slower than any healthy one of its kind",
    "fd-lost": "the client's descriptor did not arrive with its frame",
    "no-room": "decoded has no room for the sequence any more; it is handed over again",
}
"""Every code that may travel in ERROR, REFUSE or REJECT, with its meaning."""


class ProtocolError(Exception):
    """Root of everything the protocol raises."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    _codes_used: ClassVar[dict[str, str]] = {}

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a code that is unknown, or that another class uses already."""
        super().__init_subclass__(**kwargs)
        code = cls.__dict__.get("code")
        if code is None:
            return
        if code not in CODES:
            raise TypeError(f"{cls.__name__} uses the code {code!r}, which CODES does not explain")
        owner = ProtocolError._codes_used.setdefault(code, cls.__qualname__)
        if owner != cls.__qualname__:
            raise TypeError(f"{cls.__name__} uses the code {code!r} of {owner}")


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules.  Tell it with an ERROR frame, close, and live on."""


class FrameTooLargeError(RemoteProtocolError, ValueError):
    """A frame announced more bytes than this connection may carry; its body is never read."""

    code = "frame-too-large"

    def __init__(self, *, announced_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a frame of {announced_bytes} bytes exceeds the {limit_bytes} that are taken here; "
            "send less, or raise the daemon's limits.max_request_bytes"
        )
        self.announced_bytes, self.limit_bytes = announced_bytes, limit_bytes


class MalformedFrameError(RemoteProtocolError, ValueError):
    """A complete body is not one msgpack map within the protocol's limits."""

    code = "malformed-frame"

    def __init__(self, *, reason: str, body: bytes) -> None:
        super().__init__(
            f"a frame of {len(body)} bytes is not one msgpack map: {reason} "
            f"(it begins {body[:16].hex()})"
        )
        self.reason = reason


class InvalidMessageError(RemoteProtocolError, ValueError):
    """A map does not match the schema of any message that may arrive here."""

    code = "invalid-message"


class UnexpectedMessageError(RemoteProtocolError):
    """A message is legal, but not in the connection's present state."""

    code = "unexpected-message"

    def __init__(self, *, message: str, state: str, hint: str = "") -> None:
        """Say what came and where; `hint` tells the sender what to do instead."""
        told = f"{message} may not arrive in state {state}"
        super().__init__(f"{told}; {hint}" if hint else told)
        self.message, self.state = message, state


class StaleEpochError(RemoteProtocolError):
    """A message names a pool incarnation that is gone, so its block ids mean nothing now.

    The sender must drop its mapping, say HELLO again, and prefill anew.
    """

    code = "stale-epoch"
    retryable = True

    def __init__(self, *, received: bytes, current: bytes) -> None:
        super().__init__(
            f"pool epoch {received.hex()} is stale; the current one is {current.hex()}"
        )
        self.received, self.current = received, current


class VersionMismatchError(RemoteProtocolError):
    """A HELLO of another version does not even match our schema.

    Both daemons must be of one release; restart the one that was not updated.
    """

    code = "version"

    def __init__(self, *, ours: int, theirs: int) -> None:
        super().__init__(
            f"protocol version {ours} here and {theirs} there; run both daemons from one release"
        )
        self.ours, self.theirs = ours, theirs


class LocalProtocolError(ProtocolError):
    """We tried to break the rules ourselves: a bug of ours, never the peer's."""


class LinkRefusedError(ProtocolError):
    """The hand-shake failed; both sides' values of the field that differs are kept."""

    def __init__(self, *, reason: str, field: str, ours: str, theirs: str, cure: str) -> None:
        super().__init__(
            f"link refused ({reason}): {field} is {ours!r} here and {theirs!r} there; {cure}"
        )
        self.reason, self.field, self.ours, self.theirs, self.cure = (
            reason,
            field,
            ours,
            theirs,
            cure,
        )


class ConnectionLostError(ProtocolError, ConnectionError):
    """The peer went away before it was done.

    Where an answer was cut off, `num_tokens` of it were delivered, and sending the request again
    with `resume` makes it go on behind them.  `resume` is None before ACCEPTED.
    """

    retryable = True

    def __init__(self, text: str, *, num_tokens: int = 0, resume: Resume | None = None) -> None:
        super().__init__(text)
        self.num_tokens, self.resume = num_tokens, resume


class DeadlineError(ProtocolError, TimeoutError):
    """The peer did not answer in time; the connection is closed."""

    retryable = True


class UnixSocketError(ProtocolError, OSError):
    """A Unix socket could not be made or reached.  The text is one line and says what to do."""

    def __init__(self, text: str, *, path: str) -> None:
        super().__init__(text)
        self.path = path


class AddressInUseError(UnixSocketError):
    """Another process listens on this path; `pid` is None where it could not be told."""

    def __init__(self, *, path: str, pid: int | None) -> None:
        owner = "another process" if pid is None else f"process {pid}"
        super().__init__(
            f"{owner} listens on {path} already; stop it, or use another path (KVPAIR_SOCKET)",
            path=path,
        )
        self.pid = pid


class SocketPathError(UnixSocketError):
    """The path cannot hold a socket of ours."""


class NoSuchSocketError(UnixSocketError, FileNotFoundError):
    """Nothing is at the path."""

    retryable = True


class NotListeningError(UnixSocketError, ConnectionRefusedError):
    """A socket is at the path, but nobody listens on it."""

    retryable = True


class ListenQueueFullError(UnixSocketError, BlockingIOError):
    """The daemon lives, but its queue of new connections is full."""

    retryable = True


class SocketForbiddenError(UnixSocketError, PermissionError):
    """This user may not connect to the socket."""


class RequestError(Exception):
    """A request failed; what an ERROR frame says, as an exception."""

    def __init__(
        self, code: str, message: str, *, retryable: bool = False, retry_after_ms: int = 0
    ) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.retryable, self.retry_after_ms = retryable, retry_after_ms
