"""How the sanitizer is found and asked; what it finds, only a GPU shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.benchmarks.gpu_sanitize import MISSING, find_tool, kernel_names, main


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tool on the PATH that writes its arguments down, and finds races only."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncase "$*" in *racecheck*) exit 86;; esac\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return path


def test_both_checks_are_made_and_what_one_finds_fails(
    tool: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main() == 1
    memory, race = (tool.parent / "asked").read_text().splitlines()
    assert "--tool memcheck" in memory
    assert "kns=decode_attention_kernel" in memory
    assert "--tool racecheck" in race
    out, _ = capfd.readouterr()
    assert "memcheck: clean" in out
    assert "racecheck: 86" in out


def test_without_the_tool_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instead of a success that checked nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.benchmarks.gpu_sanitize.find_tool", lambda: None)
    assert main() == 1
    assert MISSING in capsys.readouterr().err


def test_the_newest_of_several_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for folder in ("cuda-12.9/bin", "cuda-13.0/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "compute-sanitizer").touch()
    found = find_tool(roots=[tmp_path])
    assert found == tmp_path / "cuda-13.0" / "bin" / "compute-sanitizer"


def test_every_kernel_is_named() -> None:
    """A helper that is compiled into others is none of them."""
    names = kernel_names()
    assert {"_gather_blocks_kernel", "decode_attention_kernel", "sample_kernel"} <= set(names)
    assert "_attend" not in names
