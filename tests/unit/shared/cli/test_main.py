"""`kvpair` itself: what it imports, what it lists, how it ends."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import click
import pytest

from protocol import errors as wire
from shared.cli.program import COMMANDS, exit_code
from shared.errors import ConfigError, ExitCode, KvpairError, UsageError

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair

HEAVY = frozenset({"torch", "numpy", "asyncio", "structlog", "rich", "tokenizers", "jinja2"})


def imported(*arguments: str) -> set[str]:
    """Return the top-level packages that a run of the command imports."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "from shared.cli.main import main; main()",
         *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=60,
        check=False,
    )  # fmt: skip
    names = re.findall(r"^import time:.*\| +(\S+)$", result.stderr, re.MULTILINE)
    assert "shared.version" in names
    return {name.partition(".")[0] for name in names}


def test_the_version_imports_nothing_but_itself() -> None:
    """Scripts ask for it often, and a parser costs several times Python's own start."""
    assert not imported("--version") & (HEAVY | {"click", "msgspec", "msgpack", "typing", "json"})


def test_help_imports_no_command() -> None:
    assert not imported("--help") & (HEAVY | {"msgspec", "msgpack", "tomllib"})


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--socket=/nonexistent", "x"],
        ["generate", "--help"],
        ["bench", "--help"],
        ["status", "--json", "--socket=/nonexistent"],
        ["config"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_what_asks_the_daemons_imports_nothing_heavy(arguments: list[str]) -> None:
    """Half a second of imports would be longer than most answers take to begin."""
    assert not imported(*arguments) & HEAVY


def test_version_is_one_line(kvpair: Kvpair) -> None:
    from shared.version import __version__

    assert kvpair("--version") == (0, f"kvpair {__version__}\n", "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["config"]])
def test_a_full_disk_is_named_in_one_line(kvpair: Kvpair, arguments: list[str]) -> None:
    """A measurement's figures were asked for, not a traceback."""
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", "from shared.cli.main import main; main()", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=kvpair.environ,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == ExitCode.FAILED
    assert result.stderr == "kvpair: cannot write what was asked for: No space left on device\n"


def test_standard_streams_that_were_closed_lead_nowhere(kvpair: Kvpair) -> None:
    """Else the next socket would have a number at which child processes write messages."""
    code = (
        "from shared.cli.main import main\n"
        "import os\n"
        "for fd in (0, 1, 2): os.close(fd)\n"
        "import sys; sys.stdin = sys.stdout = sys.stderr = None\n"
        "try: main(['--version'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert {os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)} == {os.devnull}\n"
        "assert all(os.get_inheritable(fd) for fd in (0, 1, 2))\n"
        "print('heard by nobody', file=sys.stderr)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], env=kvpair.environ, timeout=60)  # noqa: PLW1510  its code is looked at
    assert process.returncode == 0


def test_help_lists_every_command(kvpair: Kvpair) -> None:
    code, output, _ = kvpair("--help")
    assert code == 0
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}", output, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_of_commands_tells_what_each_says_of_itself(name: str) -> None:
    """The table stands in for modules that are not imported, so it must not fall behind."""
    command = getattr(importlib.import_module(f"shared.cli.{name}"), name)
    assert isinstance(command, click.Command)
    assert (command.help or "").splitlines()[0] == COMMANDS[name]


def test_an_unknown_command_is_a_usage_error(kvpair: Kvpair) -> None:
    code, output, errors = kvpair("generat")
    assert (code, output) == (2, "")
    assert "generat" in errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), ExitCode.USAGE),
        (ConfigError("x"), ExitCode.CONFIG),
        (wire.RequestError("busy", "x"), ExitCode.BUSY),
        (wire.RequestError("draining", "x"), ExitCode.BUSY),
        (wire.RequestError("too-large", "x"), ExitCode.FAILED),
        (wire.NoSuchSocketError("x", path="/x"), ExitCode.NO_DAEMON),
        (wire.NotListeningError("x", path="/x"), ExitCode.NO_DAEMON),
        (wire.SocketForbiddenError("x", path="/x"), ExitCode.NO_DAEMON),
        (wire.ListenQueueFullError("x", path="/x"), ExitCode.BUSY),
        (wire.StaleEpochError(received=b"a", current=b"b"), ExitCode.FAILED),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_error_has_its_exit_code(
    error: KvpairError | wire.ProtocolError | wire.RequestError, code: ExitCode
) -> None:
    assert exit_code(error) is code
