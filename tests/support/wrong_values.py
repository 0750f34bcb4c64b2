"""Values that a type does not admit, made from the type itself, so that no field is forgotten.

Of a number: just outside of each bound, NaN and the infinite ones, and other types that look like
it.  Of a text: too short, too long, not of its pattern.  Of a list: too long, and each of its
items wrong.  Of a struct: each field wrong, one missing, one unknown.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from msgspec import NODEFAULT, inspect

_PYTHON: dict[type[inspect.Type], type] = {
    inspect.IntType: int,
    inspect.StrType: str,
    inspect.ListType: list,
    inspect.StructType: dict,
}
"""What values of a kind are, of those kinds that stand beside others in a union."""

Wrong = tuple[str, object]
"""Where, and the whole value with the wrong one in it."""


def wrong_values(info: inspect.Type, good: object = None) -> Iterator[Wrong]:
    """Yield values that the type must refuse.

    Args:
        info: The type.
        good: A value that it admits, to be spoilt; None makes one.
    """
    info = plain(info)
    good = example(info) if good is None else good
    match info:
        case inspect.UnionType():
            yield from _wrong_union(info, good)
        case inspect.StructType():
            yield from _wrong_struct(info, good)
        case inspect.ListType():
            yield from _wrong_list(info, good)
        case _:
            for value in _wrong_scalars(info):
                yield "", value


def field_of(where: str) -> str:
    """Return the field of the whole in which something was spoilt; empty for the whole."""
    return where.removeprefix(".").partition(".")[0].partition("[")[0]


def plain(info: inspect.Type) -> inspect.Type:
    """Return a type without what is only said about it."""
    return plain(info.type) if isinstance(info, inspect.Metadata) else info


def example(info: inspect.Type) -> Any:  # noqa: ANN401 - a value of any type
    """Return a value that the type admits."""
    match plain(info):
        case inspect.UnionType(types=types):
            return example(next(each for each in types if not isinstance(each, inspect.NoneType)))
        case inspect.StructType() as struct:
            return {
                field.encode_name: example(field.type) for field in struct.fields if field.required
            }
        case inspect.ListType(item_type=item, min_length=least):
            return [example(item) for _ in range(least or 1)]
        case inspect.IntType(ge=least):
            return least or 0
        case inspect.FloatType(le=most, ge=least):
            return 1.0 if (least or 0) <= 1.0 <= (most or 1.0) else least
        case inspect.StrType(min_length=least, pattern=pattern):
            texts = ("a" * (least or 1), "stop", "cpu")
            return next(text for text in texts if pattern is None or re.search(pattern, text))
        case inspect.BytesType(min_length=least):
            return bytes(least or 0)
        case inspect.BoolType():
            return True
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.DictType():
            return {}
        case other:
            raise AssertionError(f"no example of {other}: teach this module about it")


def _wrong_scalars(info: inspect.Type) -> list[object]:
    match info:
        case inspect.IntType():
            near = [
                None if info.ge is None else info.ge - 1,
                None if info.le is None else info.le + 1,
            ]
            return [each for each in near if each is not None] + ["1", 1.5, True, [1], math.nan]
        case inspect.FloatType():
            values: list[object] = ["1", True, [1.0]]
            bounded = [
                edge
                for edge, step in ((info.ge, -math.inf), (info.le, math.inf))
                if edge is not None
                for edge in [math.nextafter(edge, step), step]
            ]
            values += [*bounded, math.nan] if bounded else []
            return values + [edge for edge in (info.gt, info.lt) if edge is not None]
        case inspect.StrType():
            texts = [5, b"a", ["a"]]
            return [
                *texts,
                *([""] if info.min_length else []),
                *(["a" * (info.max_length + 1)] if info.max_length is not None else []),
                *(["a b\n", "a\0"] if info.pattern is not None else []),
            ]
        case inspect.BytesType():
            lengths = [
                None if not info.min_length else info.min_length - 1,
                None if info.max_length is None else info.max_length + 1,
            ]
            return ["AA==", 5, *(bytes(each) for each in lengths if each is not None)]
        case inspect.BoolType():
            return [1, "true", "", [True]]
        case inspect.LiteralType():
            return ["", "none of them", 5]
        case inspect.DictType():
            return [5, "a", [1]]
        case inspect.AnyType() | inspect.NoneType():
            return []
        case other:
            raise AssertionError(f"no wrong value of {other}: teach this module about it")


def _wrong_union(info: inspect.UnionType, good: object) -> Iterator[Wrong]:
    """What none of the types admits; spoilt is the one that `good` is of."""
    kinds = [plain(each) for each in info.types if not isinstance(each, inspect.NoneType)]
    if len(kinds) == 1:
        yield from wrong_values(kinds[0], good)
        return
    for value in (math.nan, True, b"a"):
        yield "", value
    for kind in kinds:
        is_of_kind = isinstance(good, _PYTHON[type(kind)])
        others = tuple(_PYTHON[type(each)] for each in kinds if each is not kind)
        for where, value in wrong_values(kind, good if is_of_kind else None):
            if not isinstance(value, others):
                yield where, value


def _wrong_list(info: inspect.ListType, good: object) -> Iterator[Wrong]:
    yield from (("", value) for value in (5, {"a": 1}))
    item = good[0] if isinstance(good, list) and good else example(info.item_type)
    for where, value in wrong_values(info.item_type, item):
        yield f"[0]{where}", [value]
    if info.max_length is not None and info.max_length < 1 << 16:
        yield "", [item] * (info.max_length + 1)
    if info.min_length:
        yield "", []


def _wrong_struct(info: inspect.StructType, good: object) -> Iterator[Wrong]:
    assert isinstance(good, dict)
    yield "", 5
    yield "", good | {"colour": "red"}
    for field in info.fields:
        name = field.encode_name
        if field.required:
            yield "", {key: value for key, value in good.items() if key != name}
        for where, value in wrong_values(field.type, good.get(name)):
            yield f".{name}{where}", good | {name: value}
        if field.default is NODEFAULT and field.required:
            yield f".{name}", good | {name: None}
