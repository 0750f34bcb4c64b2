"""`kvpair doctor`, as a person runs it."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.tiny_gguf import TinyGguf
from tests.support.tiny_hub import write_hub_model, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Kvpair


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return TinyGguf().write(tmp_path / "tiny.gguf")


def findings(output: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in json.loads(output)["findings"]}


def test_a_healthy_machine_is_told_so_in_lines(kvpair: Kvpair, model_file: Path) -> None:
    """On the CPU, with no daemon running: nothing stops the pair."""
    code, output, errors = kvpair("doctor", "--model", str(model_file))
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert all(line.split()[0] in {"ok", "warn"} for line in lines)
    for check in ("software", "configuration", "memfd", "limits", "GPU", "model", "memory"):
        assert any(line[6:].startswith(check) for line in lines), check
    assert "\x1b" not in output


def test_a_directory_of_a_model_is_read_as_well(kvpair: Kvpair, tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    write_hub_model(folder)
    write_tokenizer(folder)
    _, output, _ = kvpair("doctor", "--json", "--model", str(folder))
    finding = findings(output)["model"]
    assert (finding["verdict"], str(folder) in finding["text"]) == ("ok", True)
    assert "memory" in findings(output), "and its size is known"


def test_every_finding_that_is_not_well_says_what_to_do(kvpair: Kvpair, tmp_path: Path) -> None:
    code, output, _ = kvpair("doctor", "--json", "--model", str(tmp_path / "none.gguf"))
    assert code == 78
    told = json.loads(output)
    assert told["ok"] is False
    assert findings(output)["model"]["verdict"] == "fail"
    for row in told["findings"]:
        assert set(row) == {"check", "verdict", "text", "cure"}
        assert (row["cure"] is None) == (row["verdict"] == "ok")


def test_a_gpu_that_is_configured_and_missing_stops_the_pair(
    kvpair: Kvpair, model_file: Path
) -> None:
    devices = ["--set", "prefilld.device=cuda:99", "--set", "decoded.device=cuda:99"]
    code, output, _ = kvpair("doctor", "--json", "--model", str(model_file), *devices)
    assert code == 78
    rows = findings(output)
    blamed = set(rows) & {"driver", "device", "device nodes", "torch", "CuPy", "proc"}
    assert "fail" in {rows[name]["verdict"] for name in blamed}
    assert rows["model"]["verdict"] == "ok", "the rest is looked at all the same"


def test_a_configuration_that_cannot_be_read_is_the_first_thing_to_mend(
    kvpair: Kvpair, tmp_path: Path
) -> None:
    path = tmp_path / "kvpair.toml"
    path.write_text("[pool]\nnum_block = 5\n")
    code, output, _ = kvpair("doctor", "--json", KVPAIR_CONFIG=str(path))
    assert code == 78
    finding = findings(output)["configuration"]
    assert finding["verdict"] == "fail"
    assert "did you mean 'num_blocks'?" in finding["cure"]


def test_a_pool_that_is_larger_than_the_machine_stops_the_pair(
    kvpair: Kvpair, model_file: Path
) -> None:
    blocks = ["--set", "pool.num_blocks=2000000000"]
    code, output, _ = kvpair("doctor", "--json", "--model", str(model_file), *blocks)
    assert code == 78
    assert findings(output)["memory"]["verdict"] == "fail"


def test_what_is_legal_and_regrettable_is_a_warning(kvpair: Kvpair, model_file: Path) -> None:
    threads = ["--set", f"prefilld.threads={(os.cpu_count() or 1) + 1}"]
    code, output, _ = kvpair("doctor", "--json", "--model", str(model_file), *threads)
    assert code == 0
    warnings = [row for row in json.loads(output)["findings"] if row["verdict"] == "warn"]
    assert any("starve each other" in row["text"] for row in warnings)
