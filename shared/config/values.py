"""One value against its key's type: checked, or refused with what would be allowed."""

from __future__ import annotations

import msgspec
from msgspec import inspect

from shared.config.paths import is_utf8
from shared.config.schema import REFUSED, SECTIONS
from shared.config.sources import Setting
from shared.errors import ConfigError

MAX_SHOWN_CHARACTERS = 80
"""Of a refused value: enough to recognise it by."""

_TYPES: dict[str, type] = {
    f"{section}.{field.name}": field.type
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
}


def check_setting(setting: Setting) -> object:
    """Return a setting's value in its key's type.

    Raises:
        ConfigError: It is of another type or out of range; the message names the key, the
            value, where it stands and what is allowed.
    """
    expected = _TYPES[setting.key]
    shown = f"{setting.key} = {_shorten(repr(setting.value))} ({setting.origin})"
    if setting.is_text and _is_quoted(setting.value):
        raise ConfigError(
            f"{shown} is not allowed", hint="leave out the quotes, which only the file wants"
        )
    try:
        value: object = msgspec.convert(setting.value, type=expected, strict=not setting.is_text)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{shown} is not allowed", hint=f"expected {allowed(expected)}"
        ) from error
    if isinstance(value, str) and not is_utf8(value):
        raise ConfigError(f"{shown} is not UTF-8")
    if reason := REFUSED.get((setting.key, value)):
        raise ConfigError(f"{shown} is not allowed: {reason}", hint=f"expected {allowed(expected)}")
    return value


def _is_quoted(value: object) -> bool:
    """Whether a text is written as TOML wants it."""
    return isinstance(value, str) and len(value) > 1 and value[0] == value[-1] in "\"'"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[:MAX_SHOWN_CHARACTERS] + "…"


def allowed(expected: type) -> str:
    """Describe in words what a type admits."""
    return _describe(inspect.type_info(expected))


def _describe(info: inspect.Type) -> str:
    match info:
        case inspect.Metadata(type=inner, extra_json_schema=schema):
            return str((schema or {}).get("description") or _describe(inner))
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(repr, values))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _range(info)
        case inspect.FloatType():
            return "a number" + _range(info)
        case inspect.StrType():
            return "a text that is not empty"
        case inspect.UnionType(types=types):
            return " or ".join(
                _describe(item) for item in types if not isinstance(item, inspect.NoneType)
            )
        case _:
            return type(info).__name__


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    lower = f"from {info.ge:g}" if info.ge is not None else f"above {info.gt:g}"
    return f" {lower} to {info.le}" if isinstance(info.le, int) else f" {lower} to {info.le:g}"
