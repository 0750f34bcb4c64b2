"""Where configured values come from: one file, the environment, the command line.

Each source yields `Setting`s: a key, a raw value, and where it stood.  Nothing is judged here
but that the key exists; `resolution` puts the sources in order and checks the values.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.config.paths import beside
from shared.config.schema import SECTIONS
from shared.errors import ConfigError, UsageError

PREFIX = "KVPAIR_"

SOCKET_VARIABLE = "KVPAIR_SOCKET"
CONFIG_VARIABLE = "KVPAIR_CONFIG"
OTHER_VARIABLES = (
    SOCKET_VARIABLE,  # prefilld's socket; decoded's lies beside it
    CONFIG_VARIABLE,  # path of the file
    "KVPAIR_TRACES",  # where the tests find their prompts; daemons under test inherit it
)
"""Variables with the prefix that name no single key."""

MAX_FILE_BYTES = 1 << 20
"""A configuration has some fifty lines; a path to anything larger is a mistake."""

MAX_NAMES_LISTED = 10
"""More would not fit on a line that somebody is to read."""

KEYS: tuple[str, ...] = tuple(
    f"{section}.{field.encode_name}"
    for section, struct in SECTIONS.items()
    for field in msgspec.structs.fields(struct)
)
"""Every `section.key`, in the order in which they are shown."""

VARIABLES: dict[str, str] = {PREFIX + key.upper().replace(".", "_"): key for key in KEYS}
"""The environment variable of every key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value as somebody wrote it."""

    key: str
    """`section.key`."""
    value: object
    """As the source has it: TOML's type, or text where the source knows nothing else."""
    origin: str
    """`file PATH`, `env NAME` or `flag NAME`."""
    is_text: bool
    """The value is text that still has to be read as the key's type."""


def read_file(path: Path) -> Iterator[Setting]:
    """Yield what a TOML file sets.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or has an unknown section or key.
    """
    origin = f"file {path}"
    try:
        with path.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        tables = tomllib.loads(content.decode())
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {' '.join(str(error).split())}") from error
    for section, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{path}: {section!r} stands outside a section",
                hint=f"sections are {', '.join(f'[{name}]' for name in SECTIONS)}",
            )
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section [{section}]", hint=_nearest(section, SECTIONS)
            )
        for name, value in table.items():
            key = f"{section}.{name}"
            if key not in KEYS:
                names = [field.encode_name for field in msgspec.structs.fields(SECTIONS[section])]
                raise ConfigError(
                    f"{path}: unknown key {name!r} in [{section}]", hint=_nearest(name, names)
                )
            yield Setting(key=key, value=value, origin=origin, is_text=False)


def read_environment(environ: Mapping[str, str]) -> Iterator[Setting]:
    """Yield what the environment sets, `KVPAIR_SOCKET` before the variables of single keys.

    Raises:
        ConfigError: A variable has the project's prefix and is unknown.
    """
    known = (*OTHER_VARIABLES, *VARIABLES)
    for name in environ:
        if name.startswith(PREFIX) and name not in known:
            raise ConfigError(f"unknown environment variable {name}", hint=_nearest(name, known))
    if socket := environ.get(SOCKET_VARIABLE):
        origin = f"env {SOCKET_VARIABLE}"
        yield Setting(key="prefilld.socket", value=socket, origin=origin, is_text=True)
        decoded_socket = str(beside(Path(socket)))
        yield Setting(key="decoded.socket", value=decoded_socket, origin=origin, is_text=True)
    for name, key in VARIABLES.items():
        if name in environ:
            yield Setting(key=key, value=environ[name], origin=f"env {name}", is_text=True)


def parse_assignment(text: str) -> Setting:
    """Read one `section.key=value` of the command line.

    Raises:
        UsageError: It has no equals sign.
        ConfigError: The key is unknown.
    """
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        raise UsageError(f"--set {text}: expected section.key=value")
    if key not in KEYS:
        raise ConfigError(f"--set: unknown key {key!r}", hint=_nearest(key, KEYS))
    return Setting(key=key, value=value.strip(), origin="flag --set", is_text=True)


def _nearest(name: str, known: Iterable[str]) -> str:
    """Say which known name was probably meant, or else list them all."""
    known = list(known)
    if matches := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {matches[0]!r}?"
    if len(known) > MAX_NAMES_LISTED:
        return "`kvpair config` lists all that are known"
    return f"known: {', '.join(known)}"
