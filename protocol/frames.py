"""Length-prefixed msgpack frames: bytes in, bodies out.  No sockets, no clocks.

A frame is a big-endian u32, the number of bytes in the body, and the body: one msgpack map.
What a map means is `codec.py`'s business; here only its form is judged.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

import msgpack  # type: ignore[import-untyped]  # it ships no types

from protocol import limits
from protocol.errors import FrameTooLargeError, LocalProtocolError, MalformedFrameError

LENGTH = struct.Struct("!I")
"""Bytes in the body, big-endian."""

MAX_ANNOUNCED_BYTES = (1 << 32) - 1
"""What the length field can say at most; each connection's own limit is far below."""


def encode_frame(body: dict[str, Any], *, max_body_bytes: int = MAX_ANNOUNCED_BYTES) -> bytes:
    """Return the frame that carries `body`.

    Raises:
        LocalProtocolError: msgpack cannot say it, or it is larger than `max_body_bytes`.
    """
    try:
        packed: bytes = msgpack.packb(body, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"a frame's body cannot be packed: {error}") from error
    if len(packed) > max_body_bytes:
        raise LocalProtocolError(f"a body of {len(packed)} bytes exceeds {max_body_bytes}")
    return LENGTH.pack(len(packed)) + packed


def decode_body(body: bytes) -> dict[str, Any]:
    """Return the one msgpack map that `body` is.

    Raises:
        MalformedFrameError: It is anything else, or breaks one of the protocol's limits.
    """
    try:
        value = msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_array_len=limits.MAX_ARRAY_LENGTH,
            max_map_len=limits.MAX_MAP_LENGTH,
            max_str_len=len(body),
            max_bin_len=len(body),
            max_ext_len=0,  # timestamps go past the hook,
            ext_hook=_refuse_extension,  # empty extensions past the length
        )
    except Exception as error:
        # The border: msgpack's exceptions share no root (ValueError, UnpackException,
        # TypeError, OverflowError, …), and some of them are empty.
        reason = str(error) or type(error).__name__
        raise MalformedFrameError(reason=reason, body=body) from error
    if not isinstance(value, dict):
        raise MalformedFrameError(reason=f"it is a {type(value).__name__}", body=body)
    return value


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} of {len(data)} bytes is not part of the protocol")


class FrameDecoder:
    """Reassembles frames from a byte stream, however the stream was cut."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        """Largest body taken from here on; may change between two frames."""
        # Deleting from a bytearray's front moves its start, not its bytes, so a stream of n
        # bytes costs O(n) however many frames it holds.
        self._buffer = bytearray()
        self._num_parsed_bytes = 0

    @property
    def num_parsed_bytes(self) -> int:
        """Bytes of the stream that whole frames have used up."""
        return self._num_parsed_bytes

    @property
    def num_received_bytes(self) -> int:
        """Bytes of the stream that have come in so far."""
        return self._num_parsed_bytes + len(self._buffer)

    def receive_data(self, data: bytes) -> None:
        """Store bytes as they came; `next_body` looks at them."""
        self._buffer += data

    def next_body(self) -> dict[str, Any] | None:
        """Return the next complete body, or None when more data is needed.

        Raises:
            FrameTooLargeError: The peer announced more than this decoder takes.
            MalformedFrameError: A complete body is not one msgpack map.
        """
        if len(self._buffer) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > self.max_body_bytes:
            raise FrameTooLargeError(announced_bytes=length, limit_bytes=self.max_body_bytes)
        end = LENGTH.size + length
        if len(self._buffer) < end:
            return None
        # msgpack wants contiguous bytes that nobody else can resize.
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        self._num_parsed_bytes += end
        return decode_body(body)

    def take_residue(self) -> bytes:
        """Return the bytes that no frame has used, and forget them."""
        residue = bytes(self._buffer)
        self._buffer.clear()
        return residue
