"""`kvpair doctor`: everything that could stop the pair from serving, one line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shared.cli.checks.finding import Finding, Verdict, from_error, ok, warn
from shared.config.options import ConfigFlags, config_options
from shared.errors import ExitCode, KvpairError

if TYPE_CHECKING:
    from shared.config import Config, ResolvedConfig

_COLORS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}

CHECK_COLUMNS = 17


@click.command
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(flags: ConfigFlags, *, as_json: bool) -> ExitCode:
    """Look for what could stop the pair from serving.

    One line for each thing that was looked at, with what to do where it is not well.  The exit
    code is 78 where something would stop the pair, else 0.  Run it as the user that runs, or
    asks, the daemons.
    """
    findings = []
    for finding in examine(flags):
        findings.append(finding)
        if not as_json:  # as it is found: some take seconds
            _print(finding)
    is_well = all(finding.verdict is not Verdict.FAIL for finding in findings)
    if as_json:
        rows = [_row(finding) for finding in findings]
        click.echo(json.dumps({"ok": is_well, "findings": rows}, indent=2))
    return ExitCode.OK if is_well else ExitCode.CONFIG


def examine(flags: ConfigFlags) -> Iterator[Finding]:
    """Yield every finding, those first on which the others rest."""
    from shared.cli.checks import machine  # noqa: PLC0415  not for `--help`

    yield machine.check_software()
    try:
        resolved = flags.resolve()
    except KvpairError as error:
        yield from_error("configuration", error)
        yield machine.check_memfd()
        yield machine.check_limits()
        return  # which sockets, which model and which devices: nobody knows
    yield from _configured(resolved)
    yield from _machine(resolved.config)
    yield from _pair(resolved.config)


def _configured(resolved: ResolvedConfig) -> Iterator[Finding]:
    files = sorted({origin for origin in resolved.origins.values() if origin.startswith("file ")})
    where = ", ".join(origin.removeprefix("file ") for origin in files) or "no file, defaults"
    yield ok("configuration", where)
    for warning in resolved.warnings:
        yield warn("configuration", warning, cure="kvpair config shows where each value came from")


def _machine(config: Config) -> Iterator[Finding]:
    from shared.cli.checks import gpu, machine  # noqa: PLC0415  as above

    is_gpu_used = {config.prefilld.device, config.decoded.device} != {gpu.CPU}
    yield machine.check_memfd()
    yield machine.check_shm(is_needed=is_gpu_used)
    yield machine.check_pid_namespace()
    yield machine.check_limits()
    yield from gpu.check_gpus(config)
    attention = machine.check_attention(config.prefilld.attention, config.prefilld.device)
    if attention is not None:
        yield attention


def _pair(config: Config) -> Iterator[Finding]:
    from shared.cli.checks import machine, sockets  # noqa: PLC0415  as above
    from shared.cli.checks.model_file import check_model  # noqa: PLC0415

    finding, sizes = check_model(config)
    yield finding
    answers = {}
    for name in ("prefilld", "decoded"):
        section = getattr(config, name)
        path = Path(section.socket)
        yield sockets.check_folder(name, path, section.group)
        finding, answers[name] = sockets.check_daemon(name, path)
        yield finding
    yield from sockets.check_pair(answers["prefilld"], answers["decoded"])
    if sizes is not None and not any(answers.values()):  # else it is taken already
        yield machine.check_memory(
            prefilld_bytes=sizes.prefilld_bytes, decoded_bytes=sizes.decoded_bytes
        )


def _print(finding: Finding) -> None:
    verdict = click.style(f"{finding.verdict:<5}", fg=_COLORS[finding.verdict])
    cure = "" if finding.cure is None else click.style(f"  → {finding.cure}", bold=True)
    click.echo(f"{verdict} {finding.check:<{CHECK_COLUMNS}} {finding.text}{cure}")
    sys.stdout.flush()


def _row(finding: Finding) -> dict[str, str | None]:
    return {
        "check": finding.check,
        "verdict": finding.verdict.value,
        "text": finding.text,
        "cure": finding.cure,
    }
