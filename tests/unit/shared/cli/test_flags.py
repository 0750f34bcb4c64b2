"""Every flag of every command at its bounds: made from the parsers, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from shared.cli.parameters import FileName, Number, Text, TokenSpan
from shared.cli.program import COMMANDS, cli, run
from shared.errors import ExitCode

NOT_TEXT = "\udcff"
"""What a byte that is no UTF-8 becomes on the command line."""


class Wrong(NamedTuple):
    """A value that must not be taken, how the command then ends, and what it says."""

    value: str
    said: str
    code: ExitCode = ExitCode.USAGE


JUDGED_LATER: dict[str, list[Wrong]] = {
    "--logit-bias": [Wrong(value, "--logit-bias") for value in ("", "7", "7=nan", "-1=1")],
    "--since": [Wrong(each, "--since") for each in ("", "soon", "9999999999d", "9" * 5000 + "d")],
    "--config": [
        Wrong("", "--config is empty"),
        Wrong("/nowhere/x.toml", "/nowhere/x.toml", ExitCode.CONFIG),
    ],
    "--set": [
        Wrong("", "--set"),
        Wrong("pool=1", "unknown key 'pool'", ExitCode.CONFIG),
        Wrong("pool.num_blocks=x", "pool.num_blocks = 'x'", ExitCode.CONFIG),
    ],
    "--model": [Wrong(value, "model.path", ExitCode.CONFIG) for value in ("", NOT_TEXT)],
    "--log-level": [Wrong(value, "log.level", ExitCode.CONFIG) for value in ("", "loud")],
    "--log-format": [Wrong(value, "log.format", ExitCode.CONFIG) for value in ("", "xml")],
    "name": [Wrong(value, "no model is called", ExitCode.CONFIG) for value in ("", "no-such")],
    "command": [],
}
"""What is any text to the parser and judged by the command, by the flag's name."""

ARGUMENTS = {"daemon": "prefilld", "shell": "bash", "name": "x", "name_or_path": "x"}
"""What stands for the arguments that a command cannot do without."""


class Flag(NamedTuple):
    """One parameter of a command, and the words that call that."""

    words: tuple[str, ...]
    parameter: click.Parameter

    @property
    def name(self) -> str:
        return self.parameter.opts[0]


def flags(command: click.Command = cli, words: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Yield every parameter of every command."""
    if not isinstance(command, click.Group):
        yield from (Flag(words, each) for each in command.params)
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        assert found is not None
        yield from flags(found, (*words, name))


def wrong_values(flag: Flag) -> list[Wrong]:
    """Return what a flag must not take."""
    if flag.name in JUDGED_LATER:
        return JUDGED_LATER[flag.name]
    values: list[str]
    match flag.parameter.type:
        case click.IntRange(min=int() as least, max=int() as most):
            values = ["", "x", "1.5", "nan", str(least - 1), str(most + 1), "9" * 40]
        case Number(min=int() | float() as least, max=int() | float() as most) as number:
            values = ["", "x", "nan", "inf", "-inf", str(least - 1), str(most + 1)]
            values += [str(least)] if number.min_open else []
        case TokenSpan(min=least, max=most):
            bounds = [str(least - 1), str(most + 1), f"{least}-{most + 1}"]
            values = ["", "x", "1.5", "-", "5-", "-5", "5-4", "1-2-3", *bounds]
        case click.Choice():
            values = ["", "none of them"]
        case FileName():
            values = [""]
        case Text():
            values = [NOT_TEXT]
        case click.types.BoolParamType():
            values = []
        case kind:
            pytest.fail(f"{flag.name} takes {kind!r}: say here what it must not take")
    is_option = isinstance(flag.parameter, click.Option)
    return [Wrong(value, f"'{flag.name}'" if is_option else "invalid value") for value in values]


CASES = [
    pytest.param(flag, wrong, id=f"{' '.join(flag.words)} {flag.name} {wrong.value[:12]!a}")
    for flag in flags()
    for wrong in wrong_values(flag)
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens, and nothing is configured."""
    monkeypatch.setenv("KVPAIR_SOCKET", str(tmp_path / "p.sock"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("flag", "wrong"), CASES)
def test_a_value_that_a_flag_does_not_take_is_named(
    flag: Flag, wrong: Wrong, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flag is told, before anybody is asked and anything is written."""
    is_option = isinstance(flag.parameter, click.Option)
    others = [
        ARGUMENTS[other.name]
        for other in flags()
        if other.words == flag.words and other.parameter.required and other.name != flag.name
    ]
    given = [f"{flag.name}={wrong.value}" if is_option else wrong.value]
    if is_option and not flag.name.startswith("--"):
        given = [flag.name, wrong.value]
    assert run([*flag.words, *given, *others]) == wrong.code
    output, errors = capsys.readouterr()
    told = output if flag.words == ("doctor",) and not errors else errors  # its findings
    assert wrong.said.casefold() in told.casefold()
    assert output in {"", told}


def test_every_command_is_looked_at() -> None:
    assert {flag.words[0] for flag in flags()} == COMMANDS.keys()


def test_a_sampling_flag_without_a_temperature_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It would be taken and do nothing: the answer is the likeliest token's all the same."""
    for flag in ("--top-k=5", "--top-p=0.9", "--min-p=0.1"):
        for words in (["generate", flag, "x"], ["chat", flag]):
            assert run(words) == ExitCode.USAGE
            said = capsys.readouterr().err
            assert f"{flag.partition('=')[0]} needs a temperature; add --temperature" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["--top-k=5", "--temperature=0"],
        ["--top-k=0"],
        ["--top-p=1", "--min-p=0"],
        ["--seed=3"],
        ["--top-p=0.9", "--temperature=0.5"],
    ],
)
def test_what_says_what_it_means_is_asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A temperature of 0 may be one of many that a script goes through."""
    assert run(["generate", *arguments, "x"]) == ExitCode.NO_DAEMON
    assert "no socket" in capsys.readouterr().err
