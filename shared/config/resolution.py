"""One answer from many sources: defaults < file < environment < flags, resolved once.

The result is frozen and complete, and remembers where each value came from, so that nobody
reads the environment or a file again later.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.config.addresses import HttpAddress, parse_http_address
from shared.config.devices import check_devices, with_device_defaults
from shared.config.paths import (
    DECODED_SOCKET,
    PREFILLD_SOCKET,
    beside,
    check_socket_path,
    default_socket_directory,
)
from shared.config.schema import SECTIONS, Config
from shared.config.sources import CONFIG_VARIABLE, KEYS, Setting, read_environment, read_file
from shared.config.values import check_setting
from shared.errors import ConfigError

SYSTEM_FILE = Path("/etc/kvpair/kvpair.toml")
"""Read where it exists, unless another file is named."""

_SOCKETS = {"prefilld.socket": PREFILLD_SOCKET, "decoded.socket": DECODED_SOCKET}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """The configuration and where it came from."""

    config: Config
    origins: Mapping[str, str]
    """For every `section.key`: `default`, `file PATH`, `env NAME` or `flag NAME`."""
    warnings: tuple[str, ...]
    """What is legal but will be regretted, one line each; a daemon logs them at its start."""

    def values(self) -> dict[str, object]:
        """Return every `section.key` with its value, in the order of the schema."""
        return {
            f"{section}.{name}": value
            for section in SECTIONS
            for name, value in msgspec.structs.asdict(getattr(self.config, section)).items()
        }


def resolve(
    *,
    environ: Mapping[str, str],
    flags: Iterable[Setting] = (),
    config_file: Path | None = None,
    num_cores: int | None = None,
    system_file: Path = SYSTEM_FILE,
) -> ResolvedConfig:
    """Read every source and check every value.

    Args:
        environ: The environment; `KVPAIR_CONFIG` may name the file.
        flags: What the command line sets; a later one wins.
        config_file: The file that `--config` names; it must exist.
        num_cores: Cores that the default thread counts halve; None asks the kernel.
        system_file: The file that is read, where it exists, when none is named.

    Raises:
        ConfigError: Something is unknown, of a wrong type, out of range or unreadable; the
            message names where it stands, its value and what is allowed.
    """
    if num_cores is None:
        num_cores = len(os.sched_getaffinity(0))
    layers: list[Setting] = []
    if config_file is not None:
        layers.extend(read_file(config_file))
    elif named := environ.get(CONFIG_VARIABLE):
        layers.extend(read_file(Path(named)))
    elif _may_exist(system_file):
        layers.extend(read_file(system_file))
    layers.extend(read_environment(environ))
    layers.extend(flags)

    directory = default_socket_directory(environ)
    values: dict[str, object] = {key: str(directory / name) for key, name in _SOCKETS.items()}
    origins = dict.fromkeys(KEYS, "default")
    for setting in layers:
        values[setting.key] = check_setting(setting)
        origins[setting.key] = setting.origin
    if origins["decoded.socket"] == "default":
        # Beside the other one, wherever that was put.
        values["decoded.socket"] = str(beside(Path(str(values["prefilld.socket"]))))
    for key in _SOCKETS:
        values[key] = os.path.abspath(str(values[key]))
        check_socket_path(str(values[key]), origin=origins[key])

    config = with_device_defaults(_with_threads(_compose(values), num_cores))
    _check_whole(config, origins)
    return ResolvedConfig(
        config=config,
        origins=MappingProxyType(origins),
        warnings=_warnings(config, num_cores),
    )


def _may_exist(path: Path) -> bool:
    """Whether a file is there, or in a folder that is closed to this user: then reading says so."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _compose(values: Mapping[str, object]) -> Config:
    """Build the structs from checked values; what is absent takes its default."""
    sections: dict[str, Any] = {
        section: struct(
            **{
                field.name: values[key]
                for field in msgspec.structs.fields(struct)
                if (key := f"{section}.{field.name}") in values
            }
        )
        for section, struct in SECTIONS.items()
    }
    return Config(**sections)


def _check_whole(config: Config, origins: Mapping[str, str]) -> None:
    """Refuse what the type of a single key cannot show to be wrong."""
    if config.prefilld.socket == config.decoded.socket:
        raise ConfigError(
            f"prefilld.socket and decoded.socket are both {config.prefilld.socket}",
            hint="each daemon needs a path of its own",
        )
    listeners: dict[HttpAddress, str] = {}
    for key, text in (
        ("prefilld.metrics", config.prefilld.metrics),
        ("decoded.metrics", config.decoded.metrics),
    ):
        if text is None:
            continue
        address = parse_http_address(text, origin=origins[key])
        if address in listeners and getattr(address, "port", None) != 0:
            raise ConfigError(
                f"{listeners[address]} and {key} are both {text}",
                hint="each daemon needs an address of its own",
            )
        listeners[address] = key
    if config.link.ping_timeout_s <= config.link.ping_interval_s:
        raise ConfigError(
            f"link.ping_timeout_s = {config.link.ping_timeout_s:g} is not more than "
            f"link.ping_interval_s = {config.link.ping_interval_s:g}",
            hint="a living peer would be held for dead",
        )
    check_devices(config)


def _with_threads(config: Config, num_cores: int) -> Config:
    """Put numbers in place of `threads = 0`."""
    default = max(1, num_cores // 2)
    prefilld, decoded = (
        replace(section, threads=section.threads or default)
        for section in (config.prefilld, config.decoded)
    )
    return replace(config, prefilld=prefilld, decoded=decoded)


def _warnings(config: Config, num_cores: int) -> tuple[str, ...]:
    """Say what is legal and will be regretted."""
    num_threads = config.prefilld.threads + config.decoded.threads
    if num_threads > num_cores:
        return (
            f"prefilld.threads + decoded.threads = {num_threads} on {num_cores} cores: "
            "the daemons will starve each other",
        )
    return ()
