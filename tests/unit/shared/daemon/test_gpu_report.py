"""`shared.daemon.gpu_report`: what both daemons would find, of machines that are only described."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shared.daemon.gpu_report import report
from tests.support.fake_machine import ONE, TWO, Machine

BOTH = ("cuda:0", "cuda:1")


def codes(machine: Machine, devices: tuple[str, str] = BOTH) -> list[tuple[str, bool]]:
    rows = report(devices, machine)["findings"]
    return [(row["code"], row["is_fatal"]) for row in rows]


def test_a_healthy_machine_has_nothing_to_tell() -> None:
    assert report(BOTH, Machine()) == {
        "torch_cuda": "13.0", "gpus": [ONE, TWO], "findings": []
    }  # fmt: skip


def test_peers_that_cannot_read_each_other_are_told_once_each_way() -> None:
    assert codes(Machine(peers=False)) == [("peer-access", True), ("peer-access", True)]
    assert codes(Machine(peers=False), ("cuda:0", "cuda")) == []


def test_what_both_find_is_told_once() -> None:
    assert codes(Machine(cupy="no module")) == [("cupy", True)]


def test_a_device_that_is_not_there_is_told_for_whom() -> None:
    assert codes(Machine(), ("cuda:0", "cuda:7")) == [("device", True)]


@pytest.mark.parametrize("faults", [{}, {"/dev/nvidia-uvm": "No such file or directory"}])
def test_a_driver_that_does_not_start_is_named_by_its_cause(faults: dict[str, str]) -> None:
    machine = Machine(driver_status=100, node_faults=faults)
    found = report(BOTH, machine)
    assert found["gpus"] == []
    (row,) = found["findings"]
    assert row["code"] == ("device-nodes" if faults else "driver")
    assert row["is_fatal"]


def test_it_runs_as_a_program_on_any_machine() -> None:
    """One without a GPU too, which is what the doctor is asked about."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "shared.daemon.gpu_report", *BOTH],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
    )
    assert set(json.loads(done.stdout)) == {"torch_cuda", "gpus", "findings"}
