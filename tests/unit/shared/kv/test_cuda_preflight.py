"""Tests of shared/kv/cuda_preflight.py, over machines that are only described."""

from __future__ import annotations

import pytest

from shared.errors import EnvironmentUnsupportedError
from shared.kv.cuda_preflight import Finding, inspect, require
from shared.kv.cuda_status import cuda_error
from shared.kv.nvml import Holder
from tests.support.fake_machine import LINUX, ONE, TWO, Machine


@pytest.mark.parametrize("peer", [ONE, TWO, None])
def test_a_healthy_machine_has_nothing_to_say(peer: str | None) -> None:
    findings = inspect(Machine(), device=ONE, peer=peer, min_free_bytes=100)
    assert findings == []
    require(findings)


@pytest.mark.parametrize(
    ("machine", "peer", "code", "said"),
    [
        (Machine(files={"/proc/version": "Linux Microsoft WSL2"}), TWO, "wsl", "run on Linux"),
        (
            Machine(files=LINUX | {"/proc/device-tree/compatible": "nvidia,p3737\0nvidia,tegra"}),
            TWO,
            "tegra",
            "has no CUDA IPC",
        ),
        (Machine(torch_cuda=None), TWO, "torch", "one that is built for CUDA"),
        (Machine(cupy="No module named 'cupy'"), TWO, "cupy", "pip install 'kvpair[cuda13]'"),
        (
            Machine(compiler="no gcc"),
            TWO,
            "c-compiler",
            "no gcc; install gcc, the C",
        ),
        (Machine(driver_status=35), TWO, "driver", "newer driver"),
        (Machine(uuids=(TWO,)), TWO, "no-device", "sees: GPU-two; see CUDA_VISIBLE_DEVICES"),
        (Machine(uuids=()), None, "no-device", "sees: none"),
        (Machine(modes={0: 2}), TWO, "compute-mode", "used by nobody; nvidia-smi -c DEFAULT"),
        (Machine(modes={0: 3}), ONE, "compute-mode", "two daemons are to use it"),
        (Machine(uuids=(ONE, "MIG-a")), "MIG-a", "mig", "one instance, or two whole GPUs"),
        (Machine(peers=False), TWO, "peer-access", "use one GPU for both daemons, or another pair"),
    ],
)
def test_what_makes_the_pool_impossible_is_named_with_a_cure(
    machine: Machine, peer: str | None, code: str, said: str
) -> None:
    (finding, *notes) = inspect(machine, device=ONE, peer=peer)
    assert (finding.code, finding.is_fatal) == (code, True)
    assert said in str(finding)
    assert not any(note.is_fatal for note in notes)
    with pytest.raises(EnvironmentUnsupportedError, match=r"\S") as caught:
        require([finding])
    assert str(caught.value) == str(finding)


@pytest.mark.parametrize("fault", ["Operation not permitted", "No such file or directory"])
@pytest.mark.parametrize("path", ["/dev/nvidiactl", "/dev/nvidia-uvm"])
def test_a_driver_without_its_nodes_is_told_by_what_is_wrong_with_them(
    path: str, fault: str
) -> None:
    """A node that is forbidden and one that is missing want different cures."""
    machine = Machine(driver_status=999, node_faults={path: fault})
    (finding,) = inspect(machine, device=ONE)
    assert finding.code == "device-nodes"
    assert finding.message == f"{path} does not open: {fault}"


def test_a_driver_that_cannot_see_its_own_proc_is_told_so() -> None:
    """The driver's own error is only that the operating system refused something."""
    (finding,) = inspect(Machine(driver_status=304, files={}), device=ONE)
    assert finding.code == "proc"
    assert "ProcSubset=all" in str(finding)


def test_a_fault_while_asking_the_driver_is_a_finding_too() -> None:
    class Broken(Machine):
        def compute_mode(self, index: int) -> int:
            raise cuda_error("cuDeviceGetAttribute", 999)

    (finding,) = inspect(Broken(), device=ONE)
    assert finding.code == "driver"


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (None, "who holds the rest is not known here; see nvidia-smi on the host"),
        ([], "no process that is visible here holds the rest"),
        (
            [Holder(7, "decoded", 3 << 30), Holder(8, None, None)],
            "it is held by decoded 7 (3,072 MiB), process 8 (some)",
        ),
    ],
)
def test_too_little_memory_says_who_has_it(held: list[Holder] | None, said: str) -> None:
    """After a crash it is the other daemon, which must let go first."""
    (finding,) = inspect(Machine(held=held), device=ONE, min_free_bytes=101)
    assert finding.code == "memory"
    assert str(finding) == (
        f"100 of the 200 bytes of GPU GPU-one are free, and 101 are needed; {said}"
    )


@pytest.mark.parametrize(
    ("machine", "peer", "code", "said"),
    [
        (Machine(uuids=(ONE,)), TWO, "hidden-peer", "CUDA_VISIBLE_DEVICES may hide it"),
        (Machine(modes={0: 3}), TWO, "compute-mode", "the other daemon opens its memory"),
        (
            Machine(environ={"PYTORCH_CUDA_ALLOC_CONF": "x:1,expandable_segments:True"}),
            TWO,
            "expandable-segments",
            "the pool is not torch's",
        ),
        (
            Machine(environ={"PYTORCH_ALLOC_CONF": "expandable_segments: true"}),
            TWO,
            "expandable-segments",
            "PYTORCH_ALLOC_CONF",
        ),
        (Machine(environ={"CUDA_MPS_PIPE_DIRECTORY": "/x"}), TWO, "mps", "ends the other"),
    ],
)
def test_what_works_and_matters_is_a_note(
    machine: Machine, peer: str, code: str, said: str
) -> None:
    """Each daemon may own one GPU and hide the other, and so on: it must start."""
    (finding,) = inspect(machine, device=ONE, peer=peer)
    assert (finding.code, finding.is_fatal) == (code, False)
    assert said in str(finding)
    require([finding])


def test_what_stops_the_start_comes_first() -> None:
    findings = inspect(
        Machine(peers=False, environ={"CUDA_MPS_PIPE_DIRECTORY": "/x"}), device=ONE, peer=TWO
    )
    assert [finding.code for finding in findings] == ["peer-access", "mps"]


def test_a_finding_without_a_hint_is_its_message() -> None:
    assert str(Finding(code="x", message="m")) == "m"
