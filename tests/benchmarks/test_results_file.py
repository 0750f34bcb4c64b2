"""Figures gather in one file, whoever measured them."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.results_file import gather


def test_what_is_run_one_by_one_gathers_in_one_file(tmp_path: Path) -> None:
    """A program that is run again replaces its own figures and leaves the others'."""
    path = tmp_path / "shown.json"
    gather({"a": 1.0, "b": 2.0}, path, program="tests.benchmarks.one", commit="abc")
    gather({"b": 3.00004, "c": 4.0}, path, program="tests.benchmarks.other", commit="def")
    gather({"b": 5.0}, path, program="tests.benchmarks.one", commit="def")
    document = json.loads(path.read_text())
    assert document["figures"] == {"a": 1.0, "b": 5.0, "c": 4.0}
    assert document["commit"] == "def"
    programs = [each.split()[2] for each in document["command"].split("; ")]
    assert programs == ["tests.benchmarks.other", "tests.benchmarks.one"]
