"""Shell completion: the scripts, and what they offer."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Kvpair


def offered(kvpair: Kvpair, *words: str) -> list[str]:
    """Return what is offered for the last of the words, as the script asks for it."""
    code, output, errors = kvpair(
        _KVPAIR_COMPLETE="bash_complete",
        COMP_WORDS=" ".join(["kvpair", *words]),
        COMP_CWORD=str(len(words)),
    )
    assert (code, errors) == (0, "")
    return [line.partition(",")[2] for line in output.splitlines() if line]


def test_commands_are_offered(kvpair: Kvpair) -> None:
    assert offered(kvpair, "lo") == ["logs"]
    assert {"top", "doctor", "metrics", "status", "completion"} <= set(offered(kvpair, ""))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("logs", "--lev"), ["--level"]),
        (("bench", "--ttft"), ["--ttft-slo-ms"]),
        (("logs", "--level", "w"), ["warning"]),
        (("metrics", "--daemon", ""), ["prefilld", "decoded"]),
        (("up", "--set", "pool.num"), ["pool.num_blocks="]),
        (("up", "--set", "pool.num_blocks=5"), []),
        (("model", "fetch", "smol"), ["smollm2-135m-instruct"]),
        (("completion", "z"), ["zsh"]),
    ],
)
def test_flags_and_values_are_offered(
    kvpair: Kvpair, words: tuple[str, ...], expected: list[str]
) -> None:
    assert offered(kvpair, *words) == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_that_its_shell_takes(kvpair: Kvpair, shell: str) -> None:
    code, output, _ = kvpair("completion", shell)
    assert code == 0
    assert f"_KVPAIR_COMPLETE={shell}_complete" in output
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=output, text=True, check=True, timeout=30)


@pytest.mark.parametrize(
    ("offer", "asked_of_bash"), [("pool.num_blocks=", "compopt -o nospace\n"), ("logs", "")]
)
def test_bash_puts_no_space_behind_a_key_that_wants_a_value(
    kvpair: Kvpair, tmp_path: Path, offer: str, asked_of_bash: str
) -> None:
    """A value that is typed behind a space would be taken for `up`'s command."""
    _, script, _ = kvpair("completion", "bash")
    program = tmp_path / "offers"
    program.write_text(f"#!/bin/sh\necho plain,{offer}\n")
    program.chmod(0o755)
    asks = f"compopt() {{ echo compopt $*; }}; _kvpair_completion {program}; echo $COMPREPLY"
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{asks}"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.stdout == f"{asked_of_bash}{offer}\n"


def test_another_shell_is_refused_with_those_that_there_are(kvpair: Kvpair) -> None:
    code, _, errors = kvpair("completion", "csh")
    assert code == 2
    assert "'bash', 'zsh', 'fish'" in errors
