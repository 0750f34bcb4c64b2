"""The codec: every message survives the wire, and nothing is coerced into one."""

from __future__ import annotations

import math

import msgspec
import pytest

from protocol import messages as m
from protocol.codec import decode_message, encode_message, one_line, validate
from protocol.errors import InvalidMessageError, LocalProtocolError
from protocol.frames import FrameDecoder
from tests.unit.protocol.samples import EPOCH, REQUEST, SAMPLES, USAGE


def through_the_wire(message: m.Message) -> m.Message:
    decoder = FrameDecoder(1 << 20)
    decoder.receive_data(encode_message(message))
    body = decoder.next_body()
    assert body is not None
    return decode_message(body, type(message))


@pytest.mark.parametrize("message", SAMPLES.values(), ids=lambda message: type(message).__name__)
def test_every_message_survives_the_wire(message: m.Message) -> None:
    """What is decoded equals what was encoded, field by field."""
    assert through_the_wire(message) == message


@pytest.mark.parametrize(
    "device", [None, m.DeviceTimings(), m.DeviceTimings(prefill=3.5, pull=0.25, first_step=4.0)]
)
def test_what_gpus_took_survives_the_wire_also_where_there_was_none(
    device: m.DeviceTimings | None,
) -> None:
    timings = m.Timings(queue=0.1, prefill=2.0, decode=3.0, total=5.1, device=device)
    end = m.End(reason="stop", usage=USAGE, timings_ms=timings)
    assert through_the_wire(end) == end


def test_an_end_without_a_word_about_gpus_is_one_from_a_cpu() -> None:
    """A daemon that knows no such field says the same."""
    body = msgspec.to_builtins(SAMPLES[m.End])
    del body["timings_ms"]["device"]
    assert decode_message(body, m.End) == SAMPLES[m.End]


@pytest.mark.parametrize("device_ns", [None, 0, 7_000_000])
def test_a_prompt_s_time_on_the_gpu_travels_with_its_handoff(device_ns: int | None) -> None:
    request = msgspec.structs.replace(REQUEST, prefill_device_ns=device_ns)
    handoff = msgspec.structs.replace(SAMPLES[m.Handoff], request=request)
    assert through_the_wire(handoff) == handoff


def test_bytes_travel_as_bytes() -> None:
    """An epoch is 16 bytes on the wire, not 24 characters of base64."""
    assert EPOCH in encode_message(SAMPLES[m.Abort])


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"surprise": 1}, "generate: Object contains unknown field `surprise`"),
        ({"sampling": {"heat": 1}}, r"unknown field `heat` - at `\$.sampling`"),
        ({"sampling": {"temperature": math.nan}}, r"at `\$.sampling.temperature`"),
        ({"sampling": {"temperature": math.inf}}, r"<= 100.0 - at `\$.sampling.temperature`"),
        ({"sampling": {"temperature": -1.0}}, r">= 0.0 - at `\$.sampling.temperature`"),
        ({"sampling": {"top_p": math.nan}}, r"at `\$.sampling.top_p`"),
        ({"sampling": {"temperature": True}}, "Expected `float`, got `bool`"),
        ({"sampling": {"top_k": True}}, "Expected `int`, got `bool`"),
        ({"sampling": {"top_k": 3.0}}, "Expected `int`, got `float`"),
        ({"sampling": {"top_k": "3"}}, "Expected `int`, got `str`"),
        ({"max_tokens": 0}, r"Expected `int` >= 1 - at `\$.max_tokens`"),
        ({"raw": 1}, "Expected `bool`, got `int`"),
        ({"id": "two\nlines"}, r"matching regex .* at `\$.id`"),
        ({"prompt": []}, "`prompt` is an empty list"),
        ({"prompt": [1, True]}, r"got `bool` - at `\$.prompt\[1\]`"),
        ({"prompt": [1, {"role": "user", "content": "x"}]}, "mixes chat messages and token ids"),
        ({"prompt": [-1]}, r"at `\$.prompt\[0\]`"),
        ({"prompt": [{"role": "u", "content": "x"}] * 4097}, "more than 4096 chat messages"),
        ({"prompt": b"bytes"}, "got `bytes`"),
        ({"stop": [""]}, r"at `\$.stop\[0\]`"),
        ({"type": "gibberish"}, "gibberish: Invalid value 'gibberish'"),
        ({"type": 3}, "a message without a type: Expected `str`, got `int`"),
    ],
)
def test_a_fault_is_named_with_its_path(fault: dict[str, object], text: str) -> None:
    """One line says which field is wrong and how."""
    body = {"type": "generate", "prompt": "x", **fault}
    with pytest.raises(InvalidMessageError, match=text) as caught:
        decode_message(body, m.ToPrefilld)
    assert str(caught.value).isprintable()


def test_base64_text_is_not_bytes() -> None:
    """By default msgspec would take this string for an epoch."""
    body = {"type": "abort", "epoch": "AAAAAAAAAAAAAAAAAAAAAA==", "lease": 1}
    with pytest.raises(InvalidMessageError, match="Expected `bytes`, got `str`"):
        decode_message(body, m.LinkToDecoded)


def test_an_integer_may_stand_for_a_real_number() -> None:
    """Encoders in other languages write 1.0 as 1."""
    body = {"type": "generate", "prompt": "x", "sampling": {"temperature": 1}}
    request = decode_message(body, m.ToPrefilld)
    assert isinstance(request, m.Generate)
    assert type(request.sampling.temperature) is float


def test_a_peer_cannot_choose_how_long_a_log_line_is() -> None:
    """Unknown names are shown bounded and without control characters."""
    body = {"type": "generate", "prompt": "x", "\x1b[31m\n" * 10_000: 1}
    with pytest.raises(InvalidMessageError, match="unknown field") as caught:
        decode_message(body, m.ToPrefilld)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.nan, "`status.x` is not finite"),
        (b"raw", "`status.x` is of type bytes"),
        ({b"k": 1}, "`status.x` has a key that is not a string"),
        ([[[[[[[[[1]]]]]]]]], "nested more than 8 deep"),
    ],
)
def test_status_holds_plain_values_only(value: object, text: str) -> None:
    """It goes to JSON as it is, so what JSON cannot say is refused here."""
    with pytest.raises(InvalidMessageError, match=text):
        decode_message({"type": "status", "status": {"x": value}}, m.FromDaemon)


def test_fields_of_the_fingerprint_equal_themselves() -> None:
    """A NaN would make two equal layouts differ."""
    with pytest.raises(ValueError, match=r"`fields\.theta` is not finite"):
        m.Hello(
            version=1,
            instance=SAMPLES[m.Hello].instance,  # type: ignore[attr-defined]
            epoch=EPOCH,
            backend="memfd",
            device="cpu",
            fingerprint="f",
            fields={"theta": math.nan},
        )


@pytest.mark.parametrize("prompt", ["\ud800", object()])
def test_what_has_no_form_on_the_wire_is_our_fault(prompt: object) -> None:
    """It names the message, and is not blamed on the peer."""
    with pytest.raises(LocalProtocolError, match=r"^generate: "):
        encode_message(m.Generate(prompt=prompt))  # type: ignore[arg-type]


def test_validate_sees_what_the_receiver_will_see() -> None:
    """Struct constructors check nothing, so a sender can ask before it sends."""
    assert validate(SAMPLES[m.Handoff]) == SAMPLES[m.Handoff]
    with pytest.raises(InvalidMessageError, match=r"at `\$.index`"):
        validate(m.Tokens(index=-1, ids=[], text=""))
    with pytest.raises(LocalProtocolError, match=r"^generate: "):
        validate(m.Generate(prompt=object()))  # type: ignore[arg-type]


def test_one_line_is_printable_and_bounded() -> None:
    """Control characters become spaces; letters of any script stay."""
    assert one_line("a\r\nb\tñ") == "a  b ñ"
    assert one_line("x" * 401) == "x" * 400 + "…"
