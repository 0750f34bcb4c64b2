"""The pair as a service under a real systemd: started, killed, wedged, restarted, stopped."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.machine import SOURCE, Machine
from tests.support.pair import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(300)]

PYTHON = "/opt/kvpair/bin/python"
INSIDE = f"{SOURCE}/tests/support/inside"
DAEMONS = ("prefilld", "decoded")
SERVICES = tuple(f"{name}.service" for name in DAEMONS)
UNITS = (*SERVICES, "kvpair-devices.service", "prefilld.socket", "kvpair.target")

MAX_EXPOSURE = 16
"""Tenths, as systemd-analyze wants them."""

NUM_STREAMS = 6
MAX_TOKENS = 1_500
"""Some seconds of the tiny model, so that what a test does happens in mid-stream."""


def answer(machine: Machine, prompt: str = "hello", *, user: str = "member") -> str:
    """Ask one question as somebody would at a shell."""
    return machine.run(
        *("kvpair", "generate", "--max-tokens", "8", "--ignore-eos", "--json", prompt), user=user
    )


class Streams:
    """What `streams.py` holds open."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"

    def end(self) -> list[dict[str, Any]]:
        """Wait until all streams have ended, and return how."""
        output, _ = self._process.communicate(timeout=100)
        return [json.loads(line) for line in output.splitlines()]


@contextmanager
def streams(machine: Machine) -> Iterator[Streams]:
    """Hold streams open, all of which have tokens from decoded."""
    process = machine.start(
        *(PYTHON, f"{INSIDE}/streams.py", str(NUM_STREAMS), str(MAX_TOKENS)), user="member"
    )
    try:
        yield Streams(process)
    finally:
        process.kill()
        process.communicate()


WHOLE = {"reason": "length", "ids": MAX_TOKENS}


def wait_restarted(machine: Machine, unit: str, before: int) -> None:
    """Wait until systemd has started a unit again and the pair serves."""

    def is_up() -> bool:
        shown = machine.show(unit, "NRestarts", "ActiveState")
        return int(shown["NRestarts"]) > before and shown["ActiveState"] == "active"

    wait_until(is_up, timeout_s=60, what=f"{unit} is running again")


def num_restarts(machine: Machine, unit: str) -> int:
    """Return how often systemd has started a unit again."""
    return int(machine.property(unit, "NRestarts"))


# --- the files -----------------------------------------------------------------------------------


def test_systemd_finds_nothing_wrong_with_the_units(machine: Machine) -> None:
    """It prints what it ignores, and would go on without it."""
    done = machine.ask("systemd-analyze", "verify", *UNITS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("unit", DAEMONS)
def test_a_unit_is_as_closed_as_cuda_allows(machine: Machine, unit: str) -> None:
    machine.run("systemd-analyze", "security", f"--threshold={MAX_EXPOSURE}", f"{unit}.service")


def test_the_boot_brings_up_the_socket_without_an_ordering_cycle(machine: Machine) -> None:
    """Clients of the first minute wait for the daemons instead of failing."""
    assert machine.property("prefilld.socket", "ActiveState") == "active"
    assert "ordering cycle" not in machine.run("journalctl", "-o", "cat")


# --- who may -------------------------------------------------------------------------------------


def test_a_client_that_comes_first_starts_the_service_and_is_answered(machine: Machine) -> None:
    """Nothing but the socket is there: the connection starts prefilld, and that decoded."""
    machine.systemctl("stop", *DAEMONS)
    assert json.loads(answer(machine))["usage"]["completion_tokens"] == 8
    assert [machine.property(unit, "ActiveState") for unit in DAEMONS] == ["active", "active"]


def test_start_returns_once_the_pair_serves(machine: Machine) -> None:
    """READY waits for the proved link, so whoever starts the units may ask at once."""
    machine.systemctl("stop", *DAEMONS)
    machine.systemctl("start", *DAEMONS)
    status = json.loads(machine.run("kvpair", "status", "--json", user="member"))
    assert status["prefilld"]["state"] == "serving"
    assert machine.property("prefilld", "StatusText") == "serving no requests"


def test_whoever_is_not_in_the_group_is_told_which_one(serving: Machine) -> None:
    done = serving.ask("kvpair", "generate", "hello", user="stranger")
    assert done.returncode == 69
    assert "user stranger may not connect to /run/kvpair/prefilld.sock" in done.stderr
    assert "join the group kvpair" in done.stderr


# --- deaths --------------------------------------------------------------------------------------


def test_a_killed_prefilld_cuts_no_running_stream(serving: Machine) -> None:
    before, asked = num_restarts(serving, "prefilld"), answer(serving)
    with streams(serving) as running:
        serving.systemctl("kill", "--signal=KILL", "prefilld")
        waiting = serving.start("kvpair", "generate", "--max-tokens=4", "hello", user="member")
        assert running.end() == [WHOLE] * NUM_STREAMS
        waiting.communicate(timeout=60)
        assert waiting.returncode == 0, "a client that came while prefilld was down failed"
    wait_restarted(serving, "prefilld", before)
    assert json.loads(answer(serving))["text"] == json.loads(asked)["text"]


def test_a_killed_decoded_comes_back_and_its_streams_go_on(serving: Machine) -> None:
    """The pair heals by itself, and clients resume what broke off: their users see a pause."""
    before, asked = num_restarts(serving, "decoded"), answer(serving)
    with streams(serving) as running:
        serving.systemctl("kill", "--signal=KILL", "decoded")
        assert running.end() == [WHOLE] * NUM_STREAMS
    wait_restarted(serving, "decoded", before)
    assert json.loads(answer(serving))["text"] == json.loads(asked)["text"]


def test_a_wedged_engine_thread_is_killed_by_the_watchdog(serving: Machine) -> None:
    """Its daemon still answers STATUS and pings: only the watchdog asks the engine thread."""
    serving.drop_in("decoded.service", "[Service]\nWatchdogSec=4\n")
    serving.systemctl("restart", "decoded")
    before, pid = num_restarts(serving, "decoded"), serving.main_pid("decoded")
    wedge = serving.start(PYTHON, f"{INSIDE}/wedge.py", str(pid), "engine_0")
    try:
        assert wedge.stdout is not None
        assert wedge.stdout.readline() == "wedged\n"
        wait_restarted(serving, "decoded", before)
    finally:
        wedge.kill()
        wedge.communicate()
        serving.revert("decoded.service")
    assert "decoded.service: Watchdog timeout" in serving.run("journalctl", "-u", "decoded")
    (stuck,) = serving.events("decoded.service", "engine.stuck")
    assert "queue" in stuck["stack"] or "thread.py" in stuck["stack"]
    serving.systemctl("start", "prefilld")
    answer(serving)


# --- changes -------------------------------------------------------------------------------------


def test_a_restart_of_prefilld_fails_no_client(serving: Machine) -> None:
    """Those that are let in are served first, those that come later wait on the socket."""
    pid = serving.main_pid("prefilld")
    with streams(serving) as running:
        restart = serving.start("systemctl", "restart", "prefilld")
        ask = ("kvpair", "generate", "--max-tokens=4", "hello")
        clients = [serving.start(*ask, user="member") for _ in range(NUM_STREAMS)]
        for process in (restart, *clients):
            process.communicate(timeout=60)
            assert process.returncode == 0
        assert running.end() == [WHOLE] * NUM_STREAMS
    assert serving.main_pid("prefilld") != pid


def test_a_reload_takes_what_it_can_and_names_the_rest(serving: Machine) -> None:
    pid = serving.main_pid("prefilld")
    original = serving.run("cat", "/etc/kvpair/kvpair.toml") + "\n"
    changed = original.replace('"debug"', '"info"').replace("threads = 1", "threads = 2")
    try:
        serving.write("/etc/kvpair/kvpair.toml", changed + "[limits]\nmax_tokens_default = 3\n")
        serving.systemctl("reload", "prefilld")
        done = serving.events("prefilld.service", "reload.done")[-1]
        assert done["changed"] == {"limits.max_tokens_default": 3, "log.level": "info"}
        refused = serving.events("prefilld.service", "reload.needs-restart")[-1]
        assert refused["keys"] == ["prefilld.threads", "decoded.threads"]
        done = json.loads(
            serving.run("kvpair", "generate", "--ignore-eos", "--json", "hello", user="member")
        )
        assert done["usage"]["completion_tokens"] == 3
        assert serving.main_pid("prefilld") == pid
    finally:
        serving.write("/etc/kvpair/kvpair.toml", original)
        serving.systemctl("reload", "prefilld")


def test_a_configuration_that_does_not_do_is_not_tried_again(serving: Machine) -> None:
    """Restarting cannot mend it; STATUS says what would."""
    serving.drop_in("decoded.service", "[Service]\nEnvironment=KVPAIR_POOL_NUM_BLOCKS=none\n")
    try:
        done = serving.ask("systemctl", "restart", "decoded")
        assert done.returncode != 0
        shown = serving.show("decoded", "ExecMainStatus", "NRestarts", "StatusText")
        assert shown["ExecMainStatus"] == "78"
        assert shown["NRestarts"] == "0"
        assert "KVPAIR_POOL_NUM_BLOCKS" in shown["StatusText"]
    finally:
        serving.revert("decoded.service")


def test_stopping_the_target_drains_and_stays_stopped(serving: Machine) -> None:
    """A socket that went on listening would start prefilld again with the next client.

    The units' own time-out is too short here: the daemons ask for what `drain_timeout_s` needs.
    """
    for unit in SERVICES:
        serving.drop_in(unit, "[Service]\nTimeoutStopSec=3\n")
    with streams(serving) as running:
        serving.systemctl("stop", "kvpair.target")
        units = (*SERVICES, "prefilld.socket")
        assert [serving.property(unit, "ActiveState") for unit in units] == ["inactive"] * 3
        assert running.end() == [WHOLE] * NUM_STREAMS
    for unit in SERVICES:
        serving.revert(unit)
    done = serving.ask("kvpair", "generate", "hello", user="member")
    assert done.returncode == 69
    assert [serving.property(name, "Result") for name in DAEMONS] == ["success", "success"]


def requests_of(lines: list[str]) -> set[str]:
    """Return the ids that log lines name, of the requests that `streams.py` made."""
    ids = {str(json.loads(line).get("request_id")) for line in lines}
    return {name for name in ids if name.startswith("stream-")}


# --- what is left behind -------------------------------------------------------------------------


def test_the_journal_holds_json_only_and_no_secret(serving: Machine) -> None:
    answer(serving, "the secret words of the last prompt")
    serving.systemctl("stop", "kvpair.target")
    lines = {name: serving.journal(f"{name}.service") for name in DAEMONS}
    for name in DAEMONS:
        assert all(json.loads(line)["daemon"] == name for line in lines[name])
    told = {name: requests_of(lines[name]) for name in DAEMONS}
    assert told["prefilld"] >= told["decoded"] > set()
    assert "secret words" not in serving.run("journalctl", "-o", "cat")
