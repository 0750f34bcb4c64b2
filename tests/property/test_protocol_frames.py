"""Frames and messages under arbitrary bytes and arbitrary cuts."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import messages as m
from protocol.codec import decode_message, encode_message
from protocol.connection import Connection
from protocol.errors import (
    FrameTooLargeError,
    InvalidMessageError,
    MalformedFrameError,
    RemoteProtocolError,
)
from protocol.frames import LENGTH, FrameDecoder, encode_frame
from protocol.states import Role
from tests.unit.protocol.samples import SAMPLES

LIMIT = 1 << 20

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
bodies = st.lists(st.dictionaries(st.text(), values, max_size=5), max_size=5)
samples = st.sampled_from(list(SAMPLES.values()))


@given(bodies=bodies, cuts=st.lists(st.integers(0, 4096)))
def test_bodies_survive_any_cut_of_the_stream(
    bodies: list[dict[str, Any]], cuts: list[int]
) -> None:
    """The decoder yields the same bodies wherever the kernel splits the bytes."""
    stream = b"".join(map(encode_frame, bodies))
    edges = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    decoder, received = FrameDecoder(LIMIT), []
    for start, stop in pairwise(edges):
        decoder.receive_data(stream[start:stop])
        while (body := decoder.next_body()) is not None:
            received.append(body)
    assert received == bodies
    assert decoder.num_parsed_bytes == decoder.num_received_bytes == len(stream)


@given(data=st.binary(max_size=4096))
def test_random_bytes_raise_only_what_is_documented(data: bytes) -> None:
    """Whatever arrives, the frame layer names the fault or asks for more."""
    decoder = FrameDecoder(LIMIT)
    decoder.receive_data(data)
    with suppress(FrameTooLargeError, MalformedFrameError):
        while decoder.next_body() is not None:
            pass


@given(body=st.binary(max_size=512) | values.map(msgpack.packb), role=st.sampled_from(Role))
def test_random_bodies_raise_only_what_is_documented(body: bytes, role: Role) -> None:
    """A whole frame of nonsense fails that connection and nothing else."""
    connection = Connection(role)
    connection.receive_data(LENGTH.pack(len(body)) + body)
    with pytest.raises(RemoteProtocolError, match=r"\S"):
        connection.next_event()


@given(message=samples, data=st.data())
def test_a_message_with_one_value_replaced_is_valid_or_named(
    message: m.Message, data: st.DataObject
) -> None:
    """Deep inside a true message, a wrong value still raises nothing but InvalidMessageError."""
    body = msgpack.unpackb(encode_message(message)[LENGTH.size :])
    place, key = body, data.draw(st.sampled_from(sorted(body)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(values)
    with suppress(InvalidMessageError):
        assert isinstance(decode_message(body, type(message)), type(message))


@given(message=samples, length=st.integers(0, 10_000))
def test_a_truncated_frame_waits_for_its_rest(message: m.Message, length: int) -> None:
    """Every prefix of a frame is no message yet, and no error either."""
    frame = encode_message(message)
    decoder = FrameDecoder(LIMIT)
    decoder.receive_data(frame[: min(length, len(frame) - 1)])
    assert decoder.next_body() is None
