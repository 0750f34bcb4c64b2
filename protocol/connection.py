"""One end of one connection, without its socket: bytes in, messages out, and the reverse.

Three verbs: `receive_data` stores, `next_event` parses and judges, `send` returns the bytes to
write.  The tables of `states.py` say what is legal; the epoch that HELLO named fences every
message about a lease.  If `next_event` raises anything but a `RemoteProtocolError`, that is a bug.
"""

from __future__ import annotations

from protocol.codec import decode_message, encode_message, one_line, type_name
from protocol.errors import (
    InvalidMessageError,
    LocalProtocolError,
    RemoteProtocolError,
    StaleEpochError,
    UnexpectedMessageError,
    VersionMismatchError,
)
from protocol.frames import MAX_ANNOUNCED_BYTES, FrameDecoder
from protocol.limits import MAX_FOLLOW_UP_BYTES, VERSION
from protocol.messages import MESSAGE_TYPES, Error, Hello, LeaseMessage, Message, Refuse
from protocol.states import (
    INCOMING,
    INITIAL,
    MAX_RECEIVED_BYTES,
    MAX_SENT_BYTES,
    RECEIVES,
    SENDS,
    Role,
    State,
)

REQUESTS = frozenset({"generate", "check"})
"""What prefilld's socket is for; clients that take decoded's for it send these there."""


class Connection:
    """What one end knows about a connection.

    Args:
        role: Which end of which kind of connection this is.
        max_body_bytes: Largest body taken; None takes the role's own limit.
    """

    def __init__(self, role: Role, *, max_body_bytes: int | None = None) -> None:
        self.role = role
        self._state = INITIAL[role]
        self._decoder = FrameDecoder(
            MAX_RECEIVED_BYTES[role] if max_body_bytes is None else max_body_bytes
        )
        self._epoch: bytes | None = None
        self._has_eof = False

    def __repr__(self) -> str:
        return f"<Connection {self.role.value}: {self._state.value}>"

    @property
    def state(self) -> State:
        """Where the connection stands."""
        return self._state

    @property
    def epoch(self) -> bytes | None:
        """The pool's epoch as HELLO named it; None before HELLO and on clients' connections."""
        return self._epoch

    @property
    def has_eof(self) -> bool:
        """Whether the peer has said its last byte."""
        return self._has_eof

    @property
    def num_parsed_bytes(self) -> int:
        """Bytes of the incoming stream that whole frames have used up."""
        return self._decoder.num_parsed_bytes

    @property
    def num_received_bytes(self) -> int:
        """Bytes of the incoming stream so far; more than parsed ones while a frame is cut."""
        return self._decoder.num_received_bytes

    # --- in ------------------------------------------------------------------------------

    def receive_data(self, data: bytes) -> None:
        """Store what was read from the socket; discard it where nothing can matter any more.

        Raises:
            LocalProtocolError: The connection was handed off, so its bytes are decoded's.
        """
        if self._state is State.HANDED_OFF:
            raise LocalProtocolError("bytes were read from a connection that was handed off")
        if self._state not in (State.CLOSED, State.FAILED):
            self._decoder.receive_data(data)

    def receive_eof(self) -> None:
        """Note that the peer will say no more.  Whole frames that came before still count."""
        self._has_eof = True

    def next_event(self) -> Message | None:
        """Return the next message, or None when more data is needed or none can come.

        After an error the state is FAILED and no message follows; `farewell` then tells the peer.

        Raises:
            FrameTooLargeError: A frame announced more than this connection takes.
            MalformedFrameError: A body is not one msgpack map.
            InvalidMessageError: A map matches no message that may arrive at this role.
            UnexpectedMessageError: The message is legal, but not here or not now.
            StaleEpochError: The message is about a lease of another pool incarnation.
            VersionMismatchError: HELLO is of another version, and not one that we can read.
        """
        if self._state in (State.CLOSED, State.FAILED, State.HANDED_OFF):
            return None
        try:
            body = self._decoder.next_body()
            if body is None:
                return None
            message = self._decode(body)
            self._receive(message)
        except RemoteProtocolError:
            self._state = State.FAILED
            self._decoder.take_residue()
            raise
        return message

    def _decode(self, body: dict[str, object]) -> Message:
        try:
            return decode_message(body, INCOMING[self.role])
        except InvalidMessageError:
            kind = body.get("type")
            if isinstance(kind, str) and kind in MESSAGE_TYPES:
                if MESSAGE_TYPES[kind] not in INCOMING[self.role].__args__:
                    is_lost = self.role is Role.DECODED_CLIENT and kind in REQUESTS
                    raise UnexpectedMessageError(
                        message=kind,
                        state=self._place(),
                        hint="this is decoded's socket, prefilld's takes requests" * is_lost,
                    ) from None
                if MESSAGE_TYPES[kind] is Hello:
                    self._blame_version(body.get("version"))
            raise

    def _blame_version(self, version: object) -> None:
        """A HELLO that we cannot read: it is prefilld all the same, and perhaps a newer one."""
        self.role = Role.DECODED_LINK
        if type(version) is int and version != VERSION:
            raise VersionMismatchError(ours=VERSION, theirs=version) from None

    def _receive(self, message: Message) -> None:
        following = RECEIVES[self.role].get(self._state, {}).get(type(message))
        if following is None:
            raise UnexpectedMessageError(message=type_name(type(message)), state=self._place())
        self._note_epoch(message)
        if isinstance(message, LeaseMessage) and message.epoch != self._epoch:
            raise StaleEpochError(received=message.epoch, current=self._epoch or b"")
        if self.role is Role.PREFILLD_CLIENT:
            self._decoder.max_body_bytes = MAX_FOLLOW_UP_BYTES
        self._state = following

    def _note_epoch(self, message: Message) -> None:
        if isinstance(message, Hello):
            self._epoch = message.epoch
            if self.role is Role.DECODED_CLIENT:  # now it is known who connected
                self.role = Role.DECODED_LINK

    def _place(self) -> str:
        return f"{self._state.value} of {self.role.value}"

    # --- out -----------------------------------------------------------------------------

    def send(self, message: Message) -> bytes:
        """Return the frame to write, and move on as if it were written.

        Raises:
            LocalProtocolError: The message is illegal in this state, names another epoch, has no
                form on the wire, or is larger than the peer takes.  Nothing has changed then.
        """
        following = SENDS[self.role].get(self._state, {}).get(type(message))
        if following is None:
            raise LocalProtocolError(
                f"{type_name(type(message))} may not be sent in state {self._place()}"
            )
        if isinstance(message, LeaseMessage) and message.epoch != self._epoch:
            raise LocalProtocolError(
                f"{type_name(type(message))} names epoch {message.epoch.hex()}, "
                f"the link is of {(self._epoch or b'').hex()}"
            )
        frame = encode_message(
            message, max_body_bytes=MAX_SENT_BYTES[self.role] or MAX_ANNOUNCED_BYTES
        )
        self._note_epoch(message)
        self._state = following
        return frame

    def farewell(self, error: RemoteProtocolError) -> bytes:
        """Return the frame that tells the peer what it did wrong; empty where there is none.

        Raises:
            LocalProtocolError: The connection has not failed.
        """
        if self._state is not State.FAILED:
            raise LocalProtocolError(f"nothing failed in state {self._place()}")
        told = SENDS[self.role].get(State.FAILED, {})
        text = one_line(str(error))
        if Error in told:
            return self.send(Error(code=error.code, message=text, retryable=error.retryable))
        if Refuse in told:
            cure = "see this daemon's log; both must run the same version"
            return self.send(
                Refuse(code=error.code, field="message", ours="", theirs=text, message=cure)
            )
        return b""

    # --- the hand-off --------------------------------------------------------------------

    def hand_off(self) -> bytes:
        """Give the connection to decoded; return the bytes that were read but not parsed.

        The caller has stopped reading.  Legal between ACCEPTED and END on prefilld's side.

        Raises:
            LocalProtocolError: There is no running answer to hand off.
        """
        if self.role is not Role.PREFILLD_CLIENT or self._state is not State.STREAMING:
            raise LocalProtocolError(f"nothing can be handed off in state {self._place()}")
        self._state = State.HANDED_OFF
        return self._decoder.take_residue()

    def reclaim(self, residue: bytes) -> None:
        """Take the connection back: decoded did not adopt it.

        Args:
            residue: What `hand_off` returned; it comes before whatever is read next.

        Raises:
            LocalProtocolError: The connection is not handed off.
        """
        if self._state is not State.HANDED_OFF:
            raise LocalProtocolError(f"nothing can be reclaimed in state {self._place()}")
        self._state = State.STREAMING
        self._decoder.receive_data(residue)
