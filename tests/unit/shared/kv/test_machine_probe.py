"""Tests of shared/kv/machine_probe.py, on whatever machine this is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.kv.cuda_preflight import Probe
from shared.kv.machine_probe import MachineProbe

PROBE: Probe = MachineProbe()


def test_a_file_is_read_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\xffb")
    assert PROBE.read(str(tmp_path / "file")) == "a\ufffdb"
    assert PROBE.read(str(tmp_path / "none")) is None
    assert PROBE.read(str(tmp_path)) is None


def test_a_node_that_does_not_open_says_why(tmp_path: Path) -> None:
    """Missing and forbidden are two things."""
    (tmp_path / "node").touch()
    assert PROBE.node_fault(str(tmp_path / "node")) is None
    assert PROBE.node_fault(str(tmp_path / "none")) == "No such file or directory"
    assert PROBE.node_fault(str(tmp_path)) == "Is a directory"


def test_a_missing_cupy_is_a_fault_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    assert "cupy" in (PROBE.cupy_fault() or "")


def test_the_environment_is_this_processs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "x")
    assert PROBE.environ["PYTORCH_ALLOC_CONF"] == "x"
