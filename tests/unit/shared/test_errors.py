"""`shared.errors`: one line to print, one code to leave with."""

from __future__ import annotations

import os

import pytest

from shared import errors
from shared.errors import ExitCode, KvpairError


def test_exit_codes_are_those_of_sysexits() -> None:
    """Service managers and scripts know these numbers."""
    assert (os.EX_UNAVAILABLE, os.EX_TEMPFAIL, os.EX_CONFIG) == (
        ExitCode.NO_DAEMON,
        ExitCode.BUSY,
        ExitCode.CONFIG,
    )


def test_the_text_is_the_fault_and_then_the_cure() -> None:
    assert str(KvpairError("no such file", hint="fetch it")) == "no such file; fetch it"
    assert str(KvpairError("no such file")) == "no such file"


@pytest.mark.parametrize("name", [name for name in vars(errors) if name.endswith("Error")])
def test_the_tree_in_the_docstring_lists_every_error_with_its_code(name: str) -> None:
    """The docstring is where a reader looks, so it must not fall behind."""
    (line,) = [
        line for line in (errors.__doc__ or "").splitlines() if f" {name} " in f" {line.strip()} "
    ]
    assert f" {vars(errors)[name].exit_code.value} " in line
