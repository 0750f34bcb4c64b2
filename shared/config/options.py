"""The command-line flags that set configuration, the same for every program that has them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TypeVar

import click
from click.shell_completion import CompletionItem

from shared.config.resolution import ResolvedConfig, resolve
from shared.config.sources import KEYS, Setting, parse_assignment
from shared.errors import UsageError

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFlags:
    """What the command line says about the configuration, not yet resolved."""

    config_file: Path | None
    settings: tuple[Setting, ...]
    arguments: tuple[str, ...]
    """The same flags as text, for handing them on to another program."""

    def resolve(self) -> ResolvedConfig:
        """Resolve them over the file and this process's environment."""
        return resolve(environ=os.environ, flags=self.settings, config_file=self.config_file)


_SHORTHANDS = {
    "model": "model.path",
    "log_level": "log.level",
    "log_format": "log.format",
}
"""Flags that stand for one key, by parameter name."""


def config_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Add `--config`, `--set` and the shorthands; the command receives `flags: ConfigFlags`."""

    @click.option(
        "--config", "config_file", metavar="FILE", type=click.Path(), help="Read this TOML file."
    )
    @click.option("--model", metavar="MODEL", help="Name or path of the model (model.path).")
    @click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error (log.level).")
    @click.option("--log-format", metavar="FORMAT", help="auto, json or console (log.format).")
    @click.option(
        "--set",
        "assignments",
        metavar="SECTION.KEY=VALUE",
        multiple=True,
        shell_complete=_complete_key,
        help="Set one value of the configuration; may be given often.",
    )
    @wraps(command)
    def with_flags(
        config_file: str | None, assignments: Sequence[str], **parameters: object
    ) -> Result:
        chosen = {name: parameters.pop(name) for name in _SHORTHANDS}
        return command(flags=_collect(config_file, assignments, chosen), **parameters)

    return with_flags


def _complete_key(
    _ctx: click.Context, _param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Offer the keys; the value behind the sign is the user's."""
    return [
        CompletionItem(f"{key}=", help="")
        for key in KEYS
        if key.startswith(incomplete.partition("=")[0]) and "=" not in incomplete
    ]


def _collect(
    config_file: str | None, assignments: Sequence[str], chosen: dict[str, object]
) -> ConfigFlags:
    """Turn parsed flags into settings, and back into the text that would give the same."""
    settings = [parse_assignment(text) for text in assignments]
    arguments = [f"--set={text}" for text in assignments]
    for name, value in chosen.items():
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        origin = f"flag {flag}"
        settings.append(Setting(key=_SHORTHANDS[name], value=value, origin=origin, is_text=True))
        arguments.append(f"{flag}={value}")
    if config_file == "":
        raise UsageError("--config is empty and names no file")
    path = None if config_file is None else Path(config_file).absolute()
    if path is not None:
        arguments.append(f"--config={path}")
    return ConfigFlags(config_file=path, settings=tuple(settings), arguments=tuple(arguments))
