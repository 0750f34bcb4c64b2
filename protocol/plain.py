"""Plain values: what STATUS, the one message with a free form, may be made of."""

from __future__ import annotations

import math

from protocol import limits


def check_plain(value: object, path: str, depth_left: int) -> None:
    """Judge a tree of maps with string keys, lists, strings, finite numbers, booleans and nil.

    Args:
        value: The tree.
        path: Its name in messages.
        depth_left: How deep it may be nested.

    Raises:
        ValueError: Something in it is not plain, or is nested too deep; the text names its place.
    """
    if depth_left == 0:
        raise ValueError(f"`{path}` is nested more than {limits.MAX_STATUS_DEPTH} deep")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"`{path}` has a key that is not a string")  # noqa: TRY004 - msgspec reports ValueErrors
            check_plain(inner, f"{path}.{key}", depth_left - 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            check_plain(inner, f"{path}[{index}]", depth_left - 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"`{path}` is not finite")
    elif value is not None and not isinstance(value, str | int):
        raise ValueError(f"`{path}` is of type {type(value).__name__}")
