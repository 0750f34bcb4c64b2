"""`shared.cli.checks.machine`: what may be wrong with a machine, and what is not."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from shared.cli.checks import machine
from shared.cli.checks.finding import Verdict

GIB = 1 << 30


def test_this_machine_can_run_the_tests() -> None:
    """Every check on the real thing: none of it stops the pair that the other tests run."""
    findings = [
        machine.check_software(),
        machine.check_memfd(),
        machine.check_shm(is_needed=False),
        machine.check_pid_namespace(),
        machine.check_limits(),
        machine.check_memory(prefilld_bytes=1, decoded_bytes=1),
    ]
    assert [finding for finding in findings if finding.verdict is Verdict.FAIL] == []


def test_a_missing_package_is_named() -> None:
    finding = machine.check_software({"torch": None, "gguf": "1.0"})
    assert finding.verdict is Verdict.FAIL
    assert finding.text.startswith("torch cannot be found")


@pytest.mark.parametrize(("is_needed", "verdict"), [(True, Verdict.FAIL), (False, Verdict.OK)])
def test_a_missing_shm_matters_where_a_gpu_is_used(
    tmp_path: Path, is_needed: bool, verdict: Verdict
) -> None:
    finding = machine.check_shm(tmp_path / "none", is_needed=is_needed)
    assert finding.verdict is verdict
    assert "is not there" in finding.text
    assert machine.check_shm(tmp_path, is_needed=True).verdict is Verdict.OK


def test_a_containers_pid_namespace_is_told() -> None:
    assert machine.check_pid_namespace(machine.MACHINE_PID_NAMESPACE).text == "the machine's own"
    assert "a container's (4026532000)" in machine.check_pid_namespace(4026532000).text


@pytest.mark.parametrize(
    ("limits", "verdict", "cure"),
    [
        ((65_536, 65_536), Verdict.OK, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), Verdict.OK, ""),
        ((1024, resource.RLIM_INFINITY), Verdict.WARN, "ulimit -n 4352"),
        ((1024, 2048), Verdict.WARN, "as root: the hard limit is 2,048"),
        ((64, 2048), Verdict.FAIL, "LimitNOFILE=4352"),
    ],
)
def test_too_few_descriptors_turn_clients_away(
    limits: tuple[int, int], verdict: Verdict, cure: str
) -> None:
    finding = machine.check_limits(limits)
    assert finding.verdict is verdict
    assert cure in (finding.cure or "")


@pytest.mark.parametrize(
    ("available", "verdict"),
    [
        (4 * GIB, Verdict.OK),
        (3 * GIB, Verdict.OK),
        (3 * GIB - 1, Verdict.WARN),
        (2 * GIB - 1, Verdict.FAIL),
    ],
)
def test_memory_is_compared_with_what_the_pair_takes(available: int, verdict: Verdict) -> None:
    """Prefilld's is taken at the start; decoded's pool only as it fills."""
    finding = machine.check_memory(prefilld_bytes=2 * GIB, decoded_bytes=GIB, available=available)
    assert finding.verdict is verdict
    assert "takes up to 3.0 GiB" in finding.text


def test_a_library_of_attention_that_cannot_be_used_is_told_before_a_start() -> None:
    """The daemon would refuse to start with it."""
    on_cpu = machine.check_attention("flash-attn-4", "cpu")
    missing = machine.check_attention("flash-attn-4", "cuda:0", is_installed=lambda _: False)
    there = machine.check_attention("flash-attn-4", "cuda:0", is_installed=lambda _: True)
    assert on_cpu is not None
    assert missing is not None
    assert there is not None
    assert [each.verdict for each in (on_cpu, missing, there)] == ["fail", "fail", "ok"]
    assert on_cpu.text == "flash-attn-4 is for GPUs, and prefilld is on the CPU"
    assert missing.text == "flash-attn-4 is not installed"


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_attention_that_needs_no_library_is_not_looked_at(name: str) -> None:
    assert machine.check_attention(name, "cpu") is None
