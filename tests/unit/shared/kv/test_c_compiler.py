"""What Triton will build with: looked at with compilers that are only scripts, and the real one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from shared.kv.c_compiler import compiler_fault

MakeCompiler = Callable[[str, str], dict[str, str]]


@pytest.fixture
def with_compiler(tmp_path: Path) -> MakeCompiler:
    """Make a program of this name and text; return an environment that finds it alone."""

    def make(name: str, script: str) -> dict[str, str]:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return {"PATH": str(tmp_path)}

    return make


def test_no_compiler_at_all_is_named(tmp_path: Path) -> None:
    """Triton would tell it minutes later, in a traceback."""
    fault = compiler_fault({"PATH": str(tmp_path)})
    assert fault == "there is no C compiler (gcc or clang)"


def test_a_compiler_that_was_chosen_and_is_not_there_is_named(with_compiler: MakeCompiler) -> None:
    """Triton takes no other one then."""
    environ = with_compiler("gcc", "exit 0") | {"CC": "tcc"}
    assert compiler_fault(environ) == "there is no C compiler (tcc)"


@pytest.mark.parametrize("name", ["gcc", "clang", "own"])
def test_a_compiler_that_works_is_no_fault(with_compiler: MakeCompiler, name: str) -> None:
    environ = with_compiler(name, 'read line; test "$line" = "#include <Python.h>"')
    assert compiler_fault(environ | ({"CC": name} if name == "own" else {})) is None


def test_missing_headers_are_told_in_the_compilers_words(with_compiler: MakeCompiler) -> None:
    """They are a package of their own on most systems, and the C library's another."""
    environ = with_compiler(
        "gcc",
        "echo 'In file included from nowhere:' >&2\n"
        "echo '<stdin>:1:10: fatal error: Python.h: No such file or directory' >&2\nexit 1",
    )
    fault = compiler_fault(environ)
    assert fault is not None
    assert fault.endswith(
        "/gcc does not compile with Python's headers: "
        "<stdin>:1:10: fatal error: Python.h: No such file or directory"
    )


def test_a_compiler_that_only_fails_is_told_by_its_status(with_compiler: MakeCompiler) -> None:
    assert (compiler_fault(with_compiler("gcc", "exit 7")) or "").endswith("it ended with 7")


def test_a_compiler_that_is_no_program_is_told(tmp_path: Path) -> None:
    """A file of another machine's, say."""
    program = tmp_path / "gcc"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    assert "cannot be run" in (compiler_fault({"PATH": str(tmp_path)}) or "")
