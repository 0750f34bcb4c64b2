"""What STATUS may be made of."""

from __future__ import annotations

import math

import pytest

from protocol.plain import check_plain


def test_a_tree_of_plain_values_passes() -> None:
    check_plain({"a": [1, 0.5, None, True, {"b": "c"}]}, "status", 4)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ({"a": math.nan}, r"`status\.a` is not finite"),
        ({"a": [b"x"]}, r"`status\.a\[0\]` is of type bytes"),
        ({1: 2}, "`status` has a key that is not a string"),
        ([[[[1]]]], r"`status\[0\]\[0\]\[0\]\[0\]` is nested more than"),
    ],
)
def test_anything_else_is_named_by_its_place(value: object, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        check_plain(value, "status", 4)
