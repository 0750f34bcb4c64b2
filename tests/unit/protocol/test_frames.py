"""Frames: any cut of the stream, refusals from the length alone, and nothing undocumented."""

from __future__ import annotations

import struct

import msgpack
import pytest

from protocol.errors import FrameTooLargeError, LocalProtocolError, MalformedFrameError
from protocol.frames import LENGTH, FrameDecoder, decode_body, encode_frame
from protocol.limits import MAX_ARRAY_LENGTH, MAX_MAP_LENGTH

LIMIT = 1 << 20


def frame_of(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def decode_one(body: bytes) -> object:
    decoder = FrameDecoder(LIMIT)
    decoder.receive_data(frame_of(body))
    return decoder.next_body()


def test_a_frame_is_a_big_endian_length_and_a_map() -> None:
    """Other languages will write these bytes; they are the contract."""
    assert encode_frame({"type": "bye"}) == b"\x00\x00\x00\x0a\x81\xa4type\xa3bye"


def test_nothing_comes_out_before_the_last_byte() -> None:
    """Grown byte by byte, the stream yields each body with its last byte and not before."""
    bodies = [{"type": "a"}, {"type": "b", "data": b"\x00" * 300}, {}]
    frames = [encode_frame(body) for body in bodies]
    decoder = FrameDecoder(LIMIT)
    received: list[tuple[int, object]] = []
    for position, byte in enumerate(b"".join(frames), start=1):
        decoder.receive_data(bytes([byte]))
        if (body := decoder.next_body()) is not None:
            received.append((position, body))
    ends = [sum(map(len, frames[: count + 1])) for count in range(len(frames))]
    assert received == list(zip(ends, bodies, strict=True))


def test_oversized_frame_is_refused_before_its_body_arrives() -> None:
    """The length alone condemns the frame, so a peer cannot make us buffer the rest."""
    decoder = FrameDecoder(LIMIT)
    decoder.receive_data(LENGTH.pack(LIMIT + 1))
    with pytest.raises(FrameTooLargeError, match="1048577 bytes exceeds the 1048576") as caught:
        decoder.next_body()
    assert (caught.value.announced_bytes, caught.value.limit_bytes) == (LIMIT + 1, LIMIT)


def test_a_body_of_exactly_the_limit_passes() -> None:
    """The bound is inclusive."""
    body = msgpack.packb({"t": b"x" * 91})
    decoder = FrameDecoder(len(body))
    decoder.receive_data(frame_of(body))
    assert decoder.next_body() == {"t": b"x" * 91}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "not one msgpack map"),
        (b"\x81", "incomplete"),
        (b"\x80\x80", "ExtraData|extra"),
        (b"\xc1", "FormatError"),
        (b"\x93\x01\x02\x03", "it is a list"),
        (b"\xc0", "it is a NoneType"),
        (b"\x81\x01\x02", "int is not allowed for map key"),
        (b"\x81\x90\x01", "list"),
        (b"\x81\xa1a\xa1\xff", "utf-8"),
        (b"\x81\xa1a\xd4\x05\x00", "exceeds max_ext_len"),
        (b"\x81\xa1a\xc7\x00\x05", "extension type 5"),
        (b"\x81\xa1a" + b"\x91" * 2000 + b"\xc0", "StackError"),
        (b"\xdd\xff\xff\xff\xff", "exceeds"),
        (b"\xdf\xff\xff\xff\xff", "exceeds"),
        (b"\x81\xa1a\xdd" + struct.pack("!I", MAX_ARRAY_LENGTH + 1), "exceeds"),
        (b"\xdf" + struct.pack("!I", MAX_MAP_LENGTH + 1) + b"\xa1a\x00", "exceeds"),
        (b"\x81\xa1a\xc6\xff\xff\xff\xff", "incomplete|exceeds"),
    ],
)
def test_whatever_is_not_one_map_is_malformed(body: bytes, reason: str) -> None:
    """The many exceptions of msgpack come out as one, with the length and the first bytes."""
    with pytest.raises(MalformedFrameError, match=reason) as caught:
        decode_one(body)
    assert f"a frame of {len(body)} bytes" in str(caught.value)
    assert body[:16].hex() in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [[None] * (MAX_ARRAY_LENGTH + 1), {str(n): None for n in range(MAX_MAP_LENGTH + 1)}],
    ids=["array", "map"],
)
def test_containers_are_bounded_even_when_all_of_them_is_there(value: object) -> None:
    """A frame within its limit may still hold more objects than we are ready to make."""
    body = msgpack.packb({"a": value})
    with pytest.raises(MalformedFrameError, match=r"exceeds max_(array|map)_len"):
        decode_body(body)


def test_timestamps_are_extensions_too() -> None:
    """The one extension that msgpack knows must not slip in as an object."""
    with pytest.raises(MalformedFrameError, match="not one msgpack map"):
        decode_body(msgpack.packb({"a": msgpack.Timestamp(1, 2)}))


def test_residue_is_what_no_frame_has_used() -> None:
    """A hand-off carries these bytes to decoded, none lost and none doubled."""
    whole, cut = encode_frame({"type": "a"}), encode_frame({"type": "b"})[:-1]
    decoder = FrameDecoder(LIMIT)
    decoder.receive_data(whole + cut)
    assert decoder.next_body() == {"type": "a"}
    assert (decoder.num_parsed_bytes, decoder.num_received_bytes) == (
        len(whole),
        len(whole) + len(cut),
    )
    assert decoder.take_residue() == cut
    assert decoder.take_residue() == b""


@pytest.mark.parametrize("value", [1 << 64, "\ud800", object()])
def test_what_msgpack_cannot_say_is_our_fault(value: object) -> None:
    """An encoder's error is never blamed on the peer."""
    with pytest.raises(LocalProtocolError, match="cannot be packed"):
        encode_frame({"value": value})


def test_a_body_above_the_peers_limit_is_our_fault() -> None:
    """The sender finds out, not the peer."""
    with pytest.raises(LocalProtocolError, match="a body of 104 bytes exceeds 64"):
        encode_frame({"t": b"x" * 99}, max_body_bytes=64)
