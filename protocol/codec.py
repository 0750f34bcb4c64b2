"""Messages to frames and bodies to messages, checked against their schemas.

Nothing is coerced: a string is not a number, a boolean is not an integer, base64 text is not
bytes.  One exception is deliberate: an integer may stand where a real number is asked for,
because encoders in other languages write 1.0 as 1.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from protocol.errors import InvalidMessageError, LocalProtocolError
from protocol.frames import MAX_ANNOUNCED_BYTES, encode_frame
from protocol.messages import Message

# Without this, msgspec would take a base64 string for bytes and write bytes as base64.
BUILTIN_TYPES = (bytes,)

# A fault is told in one line of a log; a peer must not choose how long that line is.
MAX_FAULT_CHARACTERS = 400

_MessageT = TypeVar("_MessageT", bound=Message)


def encode_message(message: Message, *, max_body_bytes: int = MAX_ANNOUNCED_BYTES) -> bytes:
    """Return the frame that carries `message`.

    Fields are not checked against their ranges; `validate` does that.

    Raises:
        LocalProtocolError: A value has no form on the wire (an integer of more than 64 bits,
            a lone surrogate, a foreign type), or the body is larger than `max_body_bytes`.
    """
    try:
        body = msgspec.to_builtins(message, builtin_types=BUILTIN_TYPES)
        return encode_frame(body, max_body_bytes=max_body_bytes)
    except (LocalProtocolError, TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{type_name(type(message))}: {error}") from error


def decode_message(body: dict[str, Any], union: Any) -> Message:  # noqa: ANN401 - a union of types is no type
    """Return the message that `body` is, one of those in `union`.

    Args:
        body: One frame's body.
        union: One of the unions of `messages.py`, or a single message type.

    Raises:
        InvalidMessageError: It is none of them; the text is one line and names path and fault.
    """
    try:
        message: Message = msgspec.convert(
            body, type=union, builtin_types=BUILTIN_TYPES, strict=True
        )
    except (msgspec.ValidationError, RecursionError) as error:
        kind = body.get("type")
        name = one_line(kind) if isinstance(kind, str) else "a message without a type"
        raise InvalidMessageError(f"{name}: {one_line(str(error))}") from error
    return message


def validate(message: _MessageT) -> _MessageT:
    """Return `message` as its receiver would see it, every field checked.

    Raises:
        InvalidMessageError: A field has a wrong type or is out of range.
        LocalProtocolError: A value has no form on the wire.
    """
    try:
        body = msgspec.to_builtins(message, builtin_types=BUILTIN_TYPES)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{type_name(type(message))}: {error}") from error
    checked = decode_message(body, type(message))
    assert isinstance(checked, type(message))
    return checked


def type_name(kind: type[Message]) -> str:
    """Return a message type's name on the wire, its `type`."""
    tag = kind.__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def one_line(text: str) -> str:
    """Return `text` fit for one line of a log: no control characters, bounded."""
    shown = "".join(
        char if char.isprintable() else " " for char in text[: MAX_FAULT_CHARACTERS + 1]
    )
    if len(shown) > MAX_FAULT_CHARACTERS:
        return shown[:MAX_FAULT_CHARACTERS] + "…"
    return shown
