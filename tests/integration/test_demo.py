"""What the README tells a newcomer to type, typed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

REPOSITORY = Path(__file__).parents[2]
KVPAIR = Path(sys.executable).with_name("kvpair")


def test_make_demo_answers_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """The question is answered, the blocks add up, and no daemon and no folder stays."""
    done = subprocess.run(
        ["make", "demo"],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert re.search(r"pool adds up\s+yes\s+yes", done.stdout)
    assert re.search(r"pool leased\s+0\s+0", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_the_whole_shape_of_json_answers_and_status(tmp_path: Path) -> None:
    """Programs read these: every key is there, and the blocks of both pools add up."""
    script = (
        f"{KVPAIR} generate --json --max-tokens 5 --ignore-eos hello > answer.json && "
        f"{KVPAIR} status --json > status.json"
    )
    command = [KVPAIR, "up", "--log-level", "warning", "--", "sh", "-c", script]
    socket = tmp_path / "prefilld.sock"
    subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"KVPAIR_SOCKET": str(socket)},
        timeout=240,
        check=True,
    )
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert set(answer) == {"id", "text", "tokens", "reason", "usage", "timings_ms"}
    assert set(answer["usage"]) == {"prompt_tokens", "cached_tokens", "completion_tokens"}
    timings = answer["timings_ms"]
    assert set(timings) == {"queue", "prefill", "ttft", "handoff", "decode", "total", "device"}
    assert timings["device"] is None, "a CPU has no clock of its own"
    assert len(answer["tokens"]) == answer["usage"]["completion_tokens"] == 5
    assert timings["ttft"] < timings["total"]
    status = json.loads((tmp_path / "status.json").read_text())
    for name, own in (("prefilld", "queue"), ("decoded", "sequences")):
        daemon = status[name]
        common = {"state", "version", "uptime_s", "epoch", "pid", "device", "model", "pool", "link"}
        assert common | {own, "counters"} <= set(daemon)
        pool = daemon["pool"]
        states = ("reserved", "free", "cached", "active", "leased", "quarantined")
        assert sum(pool[state] for state in states) == pool["total"]
        assert pool["leased"] == 0
        assert {"block_size", "block_bytes"} <= set(pool)
    link = status["prefilld"]["link"]
    assert set(link) == {"state", "peer_pid", "access", "bandwidth_gb_s", "rtt_us"}
    assert (link["state"], link["access"]) == ("open", "pull")
    assert link["peer_pid"] == status["decoded"]["pid"]
    assert set(status["decoded"]["sequences"]) == {"running", "waiting", "swapped"}


def test_up_leaves_with_the_status_of_its_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [KVPAIR, "up", "--log-level", "error", "--", "sh", "-c", "exit 7"],
        env=os.environ | {"KVPAIR_SOCKET": str(tmp_path / "prefilld.sock")},
        timeout=240,
        check=False,
    )
    assert done.returncode == 7


def test_every_command_of_the_readme_exists() -> None:
    """Each `kvpair` and `make` line of the README names a command or target that there is."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    targets = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    lines = [
        line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.split("\n")
    ]
    commands = [
        shlex.split(line, comments=True) for line in lines if line[:7] in ("kvpair ", "make de")
    ]
    assert len(commands) >= 4
    for words in commands:
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", targets, re.M)
        else:
            subcommand = [word for word in words[1:3] if re.fullmatch(r"[a-z]+", word)]
            subprocess.run(
                [KVPAIR, *subcommand, "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60
            )
