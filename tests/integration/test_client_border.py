"""What strangers send to both sockets: each hears its fault once, and the daemons serve on."""

from __future__ import annotations

import math
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack  # type: ignore[import-untyped]
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import messages as wire
from protocol.client import Client
from protocol.codec import encode_message
from protocol.errors import RequestError
from protocol.limits import MAX_LINK_BODY_BYTES
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until
from tests.support.raw_peer import RawPeer
from tests.support.wrong_values import field_of, wrong_values

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_REQUEST_BYTES = 65_536
CONTEXT_TOKENS = 4096
NUM_BLOCKS = 256
GENERATE = {"type": "generate", "prompt": [5, 6, 7], "max_tokens": 4}
LENGTH = struct.Struct("!I")

every_daemon = pytest.mark.parametrize("name", DAEMONS)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    """A pair whose daemons are the same processes at the end as at the start."""
    settings = {"limits.max_request_bytes": MAX_REQUEST_BYTES}
    with Pair(tmp_path_factory.mktemp("b"), model=tiny_model, settings=settings) as running:
        yield running
        for name in DAEMONS:
            assert running.process(name).poll() is None, running.tail()
        running.wait_settled()


def socket_of(pair: Pair, name: DaemonName) -> Path:
    return pair.socket if name == "prefilld" else pair.decoded_socket


def replies(
    pair: Pair, name: DaemonName, *parts: dict[str, Any] | bytes | wire.Message
) -> list[wire.Message]:
    """Send all of it at once and the end of the stream; return everything that comes back."""
    with RawPeer.connect(socket_of(pair, name)) as peer:
        peer.send(*parts)
        return peer.rest()


def assert_serves(pair: Pair) -> None:
    answer = pair.client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
    assert len(answer.ids) == 4
    assert pair.decoded_status()["state"] == "serving"


def framed(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def nested(depth: int) -> bytes:
    return b"\x81\xa4type" + b"\x91" * depth + b"\xc0"


MALFORMED = {
    "no map": framed(b"\x91\x01"),
    "no msgpack": framed(b"\xc1\xc1\xc1"),
    "nothing": framed(b""),
    "trailing bytes": framed(msgpack.packb({"type": "status-request"}) + b"\x00"),
    "integer keys": framed(msgpack.packb({1: 2})),
    "a doubled end": framed(msgpack.packb({"type": "status-request"})[:-1]),
    "an extension": framed(msgpack.packb({"type": msgpack.ExtType(5, b"x")})),
    "a timestamp": framed(msgpack.packb({"type": msgpack.Timestamp(1)})),
    "bad UTF-8": framed(b"\x81\xa4type\xa2\xff\xff"),
    "depth 60000": framed(nested(60_000)),
    "an array that lies": framed(b"\x81\xa4type\xdd\xff\xff\xff\xff"),
    "a map that lies": framed(b"\xdf\xff\xff\xff\xff"),
    "a string that lies": framed(b"\x81\xa4type\xdb\xff\xff\xff\xff"),
}


@every_daemon
@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_frame_is_told_once(pair: Pair, name: DaemonName, fault: str) -> None:
    (error,) = replies(pair, name, MALFORMED[fault])
    assert isinstance(error, wire.Error)
    assert error.code == "malformed-frame"
    assert_is_one_line(error)
    assert_serves(pair)


def assert_is_one_line(error: wire.Error) -> None:
    assert error.message
    assert "\n" not in error.message
    assert len(error.message) < 1_000


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("prefilld", MAX_REQUEST_BYTES + 1),
        ("prefilld", (1 << 32) - 1),
        ("decoded", MAX_LINK_BODY_BYTES + 1),  # it may turn out to be the link
        ("decoded", (1 << 32) - 1),
    ],
)
def test_an_oversized_frame_is_refused_by_its_length_alone(
    pair: Pair, name: DaemonName, num_bytes: int
) -> None:
    (error,) = replies(pair, name, LENGTH.pack(num_bytes))
    assert isinstance(error, wire.Error)
    assert error.code == "frame-too-large"
    assert str(num_bytes) in error.message
    assert_serves(pair)


def test_a_frame_of_exactly_the_limit_is_read(pair: Pair) -> None:
    empty = len(msgpack.packb({"type": "check", "raw": True, "prompt": "x" * 65_000})) - 65_000
    body = {"type": "check", "raw": True, "prompt": "x" * (MAX_REQUEST_BYTES - empty)}
    (error,) = replies(pair, "prefilld", body)
    assert isinstance(error, wire.Error | wire.Checked)
    if isinstance(error, wire.Error):
        assert error.code == "too-large"


@every_daemon
def test_a_frame_that_is_cut_anywhere_ends_without_a_word(pair: Pair, name: DaemonName) -> None:
    frame = encode_message(wire.Generate(prompt=[5, 6], max_tokens=4))
    for num_bytes in range(len(frame)):
        with RawPeer.connect(socket_of(pair, name)) as peer:
            if num_bytes:
                peer.send(frame[:num_bytes])
            peer.finish_sending()
            assert peer.rest() == [], num_bytes
    assert_serves(pair)


@every_daemon
def test_a_request_that_arrives_byte_by_byte_is_answered(pair: Pair, name: DaemonName) -> None:
    with RawPeer.connect(socket_of(pair, name)) as peer:
        for byte in encode_message(wire.StatusRequest()):
            peer.send(bytes([byte]))
        (status,) = peer.rest()
    assert isinstance(status, wire.Status)


INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("no type", {}, "invalid-message"),
    ("type is a number", {"type": 5}, "invalid-message"),
    ("unknown type", {"type": "destroy"}, "invalid-message"),
    ("unknown field", {"type": "status-request", "verbose": True}, "invalid-message"),
    ("an answer", {"type": "end"}, "unexpected-message"),
    ("cancel of nothing", {"type": "cancel"}, "unexpected-message"),
    ("a link's message", {"type": "ping", "sent_ns": 1}, "unexpected-message"),
]


@every_daemon
@pytest.mark.parametrize(("body", "code"), [pytest.param(b, c, id=i) for i, b, c in INVALID])
def test_a_message_that_may_not_come_is_told_once(
    pair: Pair, name: DaemonName, body: dict[str, Any], code: str
) -> None:
    (error,) = replies(pair, name, body)
    if isinstance(error, wire.Refuse):  # decoded takes whoever speaks of links for prefilld
        assert name == "decoded"
    else:
        assert isinstance(error, wire.Error)
        assert_is_one_line(error)
    assert error.code == code
    assert_serves(pair)


def test_prefilld_takes_no_link_and_decoded_no_request(pair: Pair) -> None:
    (error,) = replies(pair, "decoded", GENERATE)
    assert isinstance(error, wire.Error)
    assert error.code == "unexpected-message"
    (error,) = replies(pair, "prefilld", {"type": "hello", "version": 1})
    assert isinstance(error, wire.Error)
    assert error.code == "unexpected-message"
    assert_serves(pair)


WRONG_REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("unknown field", {"prompt": "x", "colour": "red"}, "invalid-message"),
    ("no prompt", {}, "invalid-message"),
    ("empty ids", {"prompt": []}, "invalid-message"),
    ("empty text", {"prompt": "", "raw": True}, "invalid-request"),
    ("mixed prompt", {"prompt": [5, {"role": "user", "content": "x"}]}, "invalid-message"),
    ("NaN temperature", {"sampling": {"temperature": math.nan}}, "invalid-message"),
    ("infinite temperature", {"sampling": {"temperature": math.inf}}, "invalid-message"),
    ("cold", {"sampling": {"temperature": -1.0}}, "invalid-message"),
    ("NaN top_p", {"sampling": {"top_p": math.nan}}, "invalid-message"),
    ("zero top_p", {"sampling": {"top_p": 0.0}}, "invalid-message"),
    ("text for a number", {"sampling": {"temperature": "1"}}, "invalid-message"),
    ("true for a number", {"max_tokens": True}, "invalid-message"),
    ("half a token", {"max_tokens": 1.5}, "invalid-message"),
    ("no tokens", {"max_tokens": 0}, "invalid-message"),
    ("negative tokens", {"max_tokens": -1}, "invalid-message"),
    ("seed beyond 63 bits", {"sampling": {"seed": 1 << 63}}, "invalid-message"),
    ("id with a space", {"id": "a b"}, "invalid-message"),
    ("id with a line feed", {"id": "ab\n"}, "invalid-message"),
    ("empty stop", {"stop": [""]}, "invalid-message"),
    ("17 stops", {"stop": ["x"] * 17}, "invalid-message"),
    ("negative id", {"prompt": [-1]}, "invalid-message"),
    ("id of 32 bits", {"prompt": [1 << 31]}, "invalid-message"),
    ("id outside the vocabulary", {"prompt": [5, 100_000]}, "invalid-request"),
    ("stop id outside it", {"stop_ids": [100_000]}, "invalid-request"),
    ("prompt of the whole context", {"prompt": [5] * CONTEXT_TOKENS}, "too-large"),
    ("prompt beyond the context", {"prompt": [5] * (CONTEXT_TOKENS + 1)}, "too-large"),
    ("text beyond the context", {"prompt": "word " * 10_000, "raw": True}, "too-large"),
    ("answer beyond the context", {"max_tokens": CONTEXT_TOKENS - 2}, "too-large"),
    ("pools exceeded", {"prompt": [5] * 4_000, "max_tokens": 96}, "too-large"),
]


def resume(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 - fields of any type
    return {"attempt": 1, "seed": 1, "fingerprint": "f" * 32, "ids": []} | changes


@pytest.mark.parametrize("kind", ["generate", "check"])
@pytest.mark.parametrize(
    ("fields", "code"), [pytest.param(f, c, id=i) for i, f, c in WRONG_REQUESTS]
)
def test_a_wrong_request_is_told_its_fault_and_costs_nothing(
    pair: Pair, kind: str, fields: dict[str, Any], code: str
) -> None:
    body = {"type": kind, "prompt": [5, 6, 7]} | fields
    if "no prompt" in body or fields == {}:
        del body["prompt"]
    (reply,) = replies(pair, "prefilld", body)
    if kind == "check" and code == "too-large" and isinstance(reply, wire.Checked):
        assert not reply.fits
        return
    assert isinstance(reply, wire.Error), reply
    assert reply.code == code
    assert not reply.retryable
    assert_is_one_line(reply)
    assert_serves(pair)


@pytest.mark.parametrize("kind", [wire.Generate, wire.Check], ids=lambda kind: kind.__name__)
def test_every_field_outside_its_bounds_is_told_by_name(
    pair: Pair, kind: type[wire.Message]
) -> None:
    """Made from the message's own definition, so that a new field is tried as well."""
    tag = {"type": kind.__struct_config__.tag}
    good = {"prompt": [5, 6, 7], "resume": resume(), "sampling": {"temperature": 1.0}}
    num_tried = 0
    for where, body in wrong_values(msgspec.inspect.type_info(kind), good):
        if not isinstance(body, dict):
            continue
        (reply,) = replies(pair, "prefilld", tag | body)
        assert isinstance(reply, wire.Error), (where, body)
        assert reply.code == "invalid-message", (where, body, reply)
        assert field_of(where) in reply.message
        assert_is_one_line(reply)
        num_tried += 1
    assert num_tried > 100
    assert_serves(pair)


def test_a_resume_that_does_not_fit_is_told_why(pair: Pair) -> None:
    fingerprint = pair.client.generate([5], max_tokens=1, ignore_eos=True).fingerprint
    cases: list[tuple[dict[str, Any], str]] = [
        (resume(), "model-changed"),
        (resume(fingerprint=fingerprint, ids=[5] * 5), "invalid-request"),
        (resume(fingerprint=fingerprint, ids=[100_000]), "invalid-request"),
        (resume(attempt=0), "invalid-message"),
    ]
    for changes, code in cases:
        (error,) = replies(pair, "prefilld", GENERATE | {"resume": changes})
        assert isinstance(error, wire.Error)
        assert error.code == code
    assert_serves(pair)


def test_a_request_that_fits_exactly_is_served(pair: Pair) -> None:
    num_prompt = (NUM_BLOCKS - 1) * 16 - 8
    answer = pair.client.generate([5] * num_prompt, max_tokens=8, ignore_eos=True)
    assert len(answer.ids) == 8
    with pytest.raises(RequestError, match="decoded's pool") as caught:
        pair.client.generate([5] * num_prompt, max_tokens=9, ignore_eos=True)
    assert caught.value.code == "too-large"


@pytest.mark.parametrize(
    "second",
    [GENERATE, {"type": "check", "prompt": [5]}, {"type": "status-request"}, {"type": "hello"}],
    ids=lambda body: body["type"],
)
def test_a_second_question_on_a_connection_ends_it(pair: Pair, second: dict[str, Any]) -> None:
    first = GENERATE | {"max_tokens": 2_000, "ignore_eos": True}
    *before, error = replies(pair, "prefilld", first, second)
    assert all(isinstance(message, wire.Accepted | wire.Tokens) for message in before)
    assert isinstance(error, wire.Error)
    assert error.code == "unexpected-message"
    assert_serves(pair)
    pair.wait_settled()


def test_nonsense_in_a_running_answer_ends_that_answer_only(pair: Pair) -> None:
    """By then the connection is decoded's."""
    with RawPeer.connect(pair.socket) as peer:
        peer.send(GENERATE | {"max_tokens": 3_000, "ignore_eos": True})
        num_tokens = 0
        while num_tokens < 20:
            if isinstance(message := peer.receive(), wire.Tokens):
                num_tokens += len(message.ids)
        peer.send(b"\xff\xff\xff\xff")
        *_, error = peer.rest()
    assert isinstance(error, wire.Error)
    assert error.code == "frame-too-large"
    assert_serves(pair)
    pair.wait_settled()


def test_cancel_again_and_again_is_one_cancel(pair: Pair) -> None:
    request = GENERATE | {"max_tokens": 3_000, "ignore_eos": True}
    *_, end = replies(pair, "prefilld", request, *[{"type": "cancel"}] * 50)
    assert isinstance(end, wire.End)
    assert end.reason == "cancelled"
    pair.wait_settled()


# --- whatever bytes ----------------------------------------------------------------------------

SEEDS = [
    msgpack.packb(GENERATE),
    msgpack.packb(GENERATE | {"sampling": {"temperature": 1.0, "seed": 4}, "stop": ["x"]}),
    msgpack.packb({"type": "check", "prompt": "hello"}),
    msgpack.packb({"type": "status-request"}),
    msgpack.packb({"type": "hello", "version": 1, "epoch": bytes(16), "fields": {"a": 1}}),
]


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Return a request of which some bytes are others, and the length is right or not."""
    body = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    shift = draw(st.sampled_from([0, 0, 0, -1, 1]))
    return LENGTH.pack(len(body) + shift) + bytes(body)


@every_daemon
@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(data=st.one_of(st.binary(max_size=200), st.binary(max_size=60).map(framed), damaged()))
def test_whatever_bytes_come_at_most_one_error_is_the_answer(
    pair: Pair, name: DaemonName, data: bytes
) -> None:
    with RawPeer.connect(socket_of(pair, name)) as peer:
        if data:
            peer.send(data)
        peer.finish_sending()
        messages = peer.rest()
    assert all(isinstance(message, wire.Accepted | wire.Tokens) for message in messages[:-1])
    assert pair.process(name).poll() is None


@every_daemon
def test_both_daemons_serve_after_all_that(pair: Pair, name: DaemonName) -> None:
    assert_serves(pair)
    assert "kvpair_" in Client(socket_of(pair, name), timeout_s=10).metrics()


# --- how many ----------------------------------------------------------------------------------


def num_fds(pair: Pair, name: DaemonName) -> int:
    return len(list(Path(f"/proc/{pair.process(name).pid}/fd").iterdir()))


def has_at_most(pair: Pair, name: DaemonName, most: int) -> bool:
    return num_fds(pair, name) <= most


def resident_kib(pair: Pair, name: DaemonName) -> int:
    status = Path(f"/proc/{pair.process(name).pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1])


def storm(pair: Pair, name: DaemonName, num_connections: int) -> None:
    """Open many connections at once, each leaving in another way."""
    peers = [RawPeer.connect(socket_of(pair, name)) for _ in range(num_connections)]
    for index, peer in enumerate(peers):
        match index % 5:
            case 0:
                peer.send(b"\x00\x00")
            case 1:
                peer.send(b"\x00\x00\x00\x01\xc1")
            case 2:
                peer.send(GENERATE if name == "prefilld" else {"type": "metrics-request"})
            case 3:
                peer.finish_sending()
    for peer in peers:
        peer.close()


@every_daemon
def test_hundreds_of_connections_leave_no_descriptor_and_no_memory_behind(
    pair: Pair, name: DaemonName
) -> None:
    storm(pair, name, 300)
    assert_serves(pair)
    pair.wait_settled()
    fds, kib = num_fds(pair, name), resident_kib(pair, name)
    for _ in range(4):
        storm(pair, name, 300)
    assert_serves(pair)
    pair.wait_settled()
    wait_until(lambda: num_fds(pair, name) <= fds, what=f"{name} has {fds} descriptors again")
    assert resident_kib(pair, name) - kib < 4_096


def test_more_answers_than_clients_may_be_connected_leave_nothing_behind(pair: Pair) -> None:
    """A connection that was handed over counts no more: prefilld takes 4,096 at once."""

    def ask(_: int) -> int:
        return len(Client(pair.socket, timeout_s=30).generate([5, 6, 7], max_tokens=2).ids)

    fds = {name: num_fds(pair, name) for name in DAEMONS}
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(ask, range(4_300))) <= {1, 2}
    pair.wait_settled()
    for name in DAEMONS:
        wait_until(partial(has_at_most, pair, name, fds[name]), what=f"{name}'s descriptors")
