"""A JSON file whose values are taken one by one, each with its type; never trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from shared.model.errors import ModelFileError

MAX_BYTES = 256 << 20
"""Largest file that is read whole: a tokenizer of 256k tokens takes 35 MB."""

MISSING_HINT = (
    "give a whole Hugging Face directory, a GGUF file, or a model that `kvpair model list` names"
)

V = TypeVar("V", int, float, bool, str)


class JsonFields:
    """One object of a JSON file.

    Args:
        path: The file, for messages.
        values: The object.
        where: Its place in the file, such as `rope_scaling.`; empty for the whole.
    """

    def __init__(self, path: Path, values: dict[str, Any], where: str = "") -> None:
        self.path, self.values, self._where = path, values, where

    def __contains__(self, name: str) -> bool:
        """Tell whether there is a value; null is none."""
        return self.values.get(name) is not None

    def fail(self, fault: str, *, hint: str | None = None) -> ModelFileError:
        """Return the error that names the file and its fault."""
        return ModelFileError(self.path, fault, hint=hint)

    def require(self, name: str, kind: type[V]) -> V:
        """Return a value.

        Raises:
            ModelFileError: There is none, or it is of another type.
        """
        if name not in self:
            raise self.fail(f"lacks `{self._where}{name}`")
        value = self.values[name]
        # A whole number may stand for a real one; a bool, to Python an int, may not.
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fail(
                f"has `{self._where}{name}` of type {type(value).__name__}, not {kind.__name__}"
            )
        return value

    def optional(self, name: str, default: V) -> V:
        """Return a value, or the default, whose type it must have, where there is none."""
        return self.require(name, type(default)) if name in self else default

    def child(self, name: str) -> JsonFields | None:
        """Return an object in this one; None where there is none.

        Raises:
            ModelFileError: The value is no object.
        """
        if name not in self:
            return None
        value = self.values[name]
        if not isinstance(value, dict):
            raise self.fail(f"has `{self._where}{name}` of type {type(value).__name__}, not object")
        return JsonFields(self.path, value, f"{self._where}{name}.")

    def ids(self, name: str) -> tuple[int, ...]:
        """Return token ids that are written as one number or as a list of them; () without any.

        Raises:
            ModelFileError: The value is neither.
        """
        value = self.values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in found):
            raise self.fail(f"has `{self._where}{name}` that is no token id: {value!r}")
        return tuple(found)


def read_json(path: Path) -> JsonFields:
    """Read a file that holds one JSON object.

    Raises:
        ModelFileError: It is missing, unreadable, too large, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ModelFileError(path, "no such file", hint=MISSING_HINT) from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise ModelFileError(path, f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is no JSON: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ModelFileError(path, "is no JSON object")
    return JsonFields(path, values)


def read_json_if_there(path: Path) -> JsonFields:
    """Read a file as `read_json`; one that is missing has no values."""
    return read_json(path) if path.exists() else JsonFields(path, {})
