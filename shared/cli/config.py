"""`kvpair config`: the configuration as the daemons would resolve it, and whence each value."""

from __future__ import annotations

import json

import click
import msgspec

from shared.config.options import ConfigFlags, config_options
from shared.config.resolution import ResolvedConfig
from shared.config.schema import SECTIONS


@click.command
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def config(flags: ConfigFlags, *, as_json: bool) -> None:
    """Show the configuration and where each value came from.

    The output is itself a configuration file.  Flags are taken as the daemons take them, so
    that their effect can be seen beforehand.
    """
    resolved = flags.resolve()
    for warning in resolved.warnings:
        click.echo(f"kvpair: warning: {warning}", err=True)
    click.echo(_as_json(resolved) if as_json else _as_toml(resolved))


def _as_json(resolved: ResolvedConfig) -> str:
    return json.dumps(
        {
            "config": msgspec.to_builtins(resolved.config),
            "origins": dict(resolved.origins),
            "warnings": resolved.warnings,
        },
        indent=2,
    )


def _as_toml(resolved: ResolvedConfig) -> str:
    """Return a file that says the same, each value's origin in a comment behind it."""
    values = resolved.values()
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for key, value in values.items():
            if not key.startswith(f"{section}."):
                continue
            name = key.partition(".")[2]
            # TOML's strings, numbers and booleans are written as JSON's; it has no null.
            text = (
                f"# {name} ="
                if value is None
                else f"{name} = {json.dumps(value, ensure_ascii=False)}"
            )
            lines.append(f"{text:<48}  # {resolved.origins[key]}")
    return "\n".join(lines)
