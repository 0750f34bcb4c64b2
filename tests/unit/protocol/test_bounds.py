"""Every field of every message at its bounds: what is outside is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol import messages as m
from protocol.codec import BUILTIN_TYPES, decode_message
from protocol.errors import InvalidMessageError
from tests.support.wrong_values import field_of, wrong_values
from tests.unit.protocol.samples import SAMPLES


def wrong_bodies(kind: type[m.Message]) -> list[tuple[str, dict[str, Any]]]:
    """Return a message of this type with every field spoilt in every way, one at a time."""
    good = msgspec.to_builtins(SAMPLES[kind], builtin_types=BUILTIN_TYPES)
    info = msgspec.inspect.type_info(kind)
    spoilt = [(where, body) for where, body in wrong_values(info, good) if isinstance(body, dict)]
    return [(where, {"type": kind.__struct_config__.tag} | body) for where, body in spoilt]


def refusal(kind: type[m.Message], body: dict[str, Any]) -> str:
    """Return what is said of a message that must not be taken."""
    try:
        decode_message(body, kind)
    except InvalidMessageError as error:
        return str(error)
    pytest.fail(f"{kind.__name__} took {body}")


@pytest.mark.parametrize("kind", SAMPLES, ids=lambda kind: kind.__name__)
def test_what_no_field_admits_is_refused_and_named(kind: type[m.Message]) -> None:
    """The other end may be anybody's program; what is taken here is trusted from then on."""
    for where, body in wrong_bodies(kind):
        said = refusal(kind, body)
        assert field_of(where) in said, body
        assert "\n" not in said


def test_the_fields_of_a_request_are_all_spoilt() -> None:
    """A field that is added without a bound, or of a new kind, shows here."""
    spoilt = {field_of(where) for where, _ in wrong_bodies(m.Generate)}
    assert spoilt >= {field.encode_name for field in msgspec.structs.fields(m.Generate)}
