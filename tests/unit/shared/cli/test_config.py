"""`kvpair config`: what it prints is a configuration file that says the same."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair


def test_the_output_is_a_file_that_says_the_same(kvpair: Kvpair, tmp_path: Path) -> None:
    code, output, errors = kvpair("config", "--set", "pool.num_blocks=7", "--model", "/m é 🐘")
    assert (code, errors) == (0, "")
    assert "num_blocks = 7                                    # flag --set\n" in output
    (tmp_path / "again.toml").write_text(output)
    assert tomllib.loads(output)["model"]["path"] == "/m é 🐘"
    code, again, _ = kvpair("config", "--config", str(tmp_path / "again.toml"))
    assert code == 0
    assert tomllib.loads(again) == tomllib.loads(output)


def test_json_has_values_and_origins(kvpair: Kvpair, socket_path: Path) -> None:
    code, output, _ = kvpair("config", "--json", KVPAIR_LOG_LEVEL="debug")
    assert code == 0
    told = json.loads(output)
    assert told["config"]["prefilld"]["socket"] == str(socket_path)
    assert told["origins"]["prefilld.socket"] == "env KVPAIR_SOCKET"
    assert told["config"]["log"]["level"] == "debug"
    assert told["origins"]["log.level"] == "env KVPAIR_LOG_LEVEL"


def test_what_is_questionable_is_said_on_stderr(kvpair: Kvpair) -> None:
    code, output, errors = kvpair("config", "--set", "prefilld.threads=1000")
    assert code == 0
    assert "warning: prefilld.threads + decoded.threads" in errors
    assert tomllib.loads(output)["prefilld"]["threads"] == 1000


def test_a_wrong_value_is_one_line_and_78(kvpair: Kvpair) -> None:
    code, output, errors = kvpair("config", "--set", "pool.num_blocks=1")
    assert (code, output) == (78, "")
    assert errors.startswith("kvpair: pool.num_blocks = '1' (flag --set) is not allowed")
    assert errors.count("\n") == 1
