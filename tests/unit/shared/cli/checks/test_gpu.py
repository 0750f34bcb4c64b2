"""`shared.cli.checks.gpu`: a driver that only looks like one, with GPUs that may be anything."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shared.cli.checks.finding import Finding, Verdict
from shared.cli.checks.gpu import TORCH_PROGRAM, check_gpus
from shared.config import resolve
from shared.config.sources import parse_assignment
from shared.kv.cuda_driver import CudaDriver
from shared.kv.errors import CudaUnavailableError

if TYPE_CHECKING:
    from pathlib import Path

    from shared.config import Config


@dataclass(frozen=True)
class Library:
    """libcuda's functions that the doctor calls."""

    names: tuple[bytes, ...] = (b"NVIDIA H200", b"NVIDIA H200")
    peers: frozenset[tuple[int, int]] = field(default=frozenset({(0, 1), (1, 0)}))
    status: int = 0

    def driver(self) -> CudaDriver:
        def count(answer: Any) -> int:  # noqa: ANN401 - ctypes.byref has no type
            answer._obj.value = len(self.names)
            return self.status

        def version(answer: Any) -> int:  # noqa: ANN401 - as above
            answer._obj.value = 13_010
            return 0

        def get(answer: Any, index: int) -> int:  # noqa: ANN401 - as above
            answer._obj.value = index
            return 0

        def uuid(raw: Any, device: ctypes.c_int) -> int:  # noqa: ANN401 - as above
            raw.raw = b"\xaa\xaa\xaa" + bytes([0xA0 + device.value]) * 13
            return 0

        def name(answer: Any, _: int, device: ctypes.c_int) -> int:  # noqa: ANN401 - as above
            answer.value = self.names[device.value]
            return 0

        def can_access(answer: Any, ours: int, theirs: int) -> int:  # noqa: ANN401 - as above
            answer._obj.value = int((ours, theirs) in self.peers)
            return 0

        functions = SimpleNamespace(
            cuEventQuery=lambda _: 0,
            cuGetErrorString=lambda _, answer: 1,
            cuDeviceGetCount=count,
            cuDriverGetVersion=version,
            cuDeviceGet=get,
            cuDeviceGetUuid_v2=uuid,
            cuDeviceGetName=name,
            cuDeviceCanAccessPeer=can_access,
        )
        return CudaDriver(functions)  # type: ignore[arg-type]


def config(tmp_path: Path, prefilld: str, decoded: str) -> Config:
    flags = [
        parse_assignment(f"prefilld.device={prefilld}"),
        parse_assignment(f"decoded.device={decoded}"),
    ]
    return resolve(environ={}, flags=flags, num_cores=2, system_file=tmp_path / "none").config


def run(program: str) -> str | None:
    return "2.13.0 13.0" if program == TORCH_PROGRAM else "14.2.0 13000"


def examine(
    tmp_path: Path,
    prefilld: str = "cuda:0",
    decoded: str = "cuda:1",
    library: Library | None = None,
    **changes: Any,  # noqa: ANN401 - arguments of the check
) -> dict[str, Finding]:
    made = library or Library()
    arguments = {"load": made.driver, "run": run, "find_program": lambda name: f"/usr/bin/{name}"}
    findings = check_gpus(config(tmp_path, prefilld, decoded), **(arguments | changes))
    return {finding.check: finding for finding in findings}


def test_a_machine_without_a_gpu_needs_none(tmp_path: Path) -> None:
    """Nothing is loaded and nothing imported: the embedded default is the CPU."""

    def load() -> CudaDriver:
        raise AssertionError("the driver was loaded")

    found = examine(tmp_path, "cpu", "cpu", load=load)
    assert [(name, finding.verdict) for name, finding in found.items()] == [("GPU", Verdict.OK)]


def test_two_gpus_in_order(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["driver"].text.startswith("CUDA 13.1; GPUs: cuda:0 = GPU-aaaaaaa0-")
    assert found["peer access"].text == "cuda:0 and cuda:1 can read each other's memory"
    assert found["torch"].text == "2.13.0, built for CUDA 13.0"
    assert found["C compiler"].text == "/usr/bin/cc"


def test_one_gpu_needs_no_peer_access(tmp_path: Path) -> None:
    found = examine(tmp_path, "cuda", "cuda:0", Library(peers=frozenset()))
    assert found["peer access"].verdict is Verdict.OK


@pytest.mark.parametrize("peers", [frozenset(), frozenset({(0, 1)}), frozenset({(1, 0)})])
def test_gpus_that_cannot_read_each_other_stop_the_pair(
    tmp_path: Path, peers: frozenset[tuple[int, int]]
) -> None:
    finding = examine(tmp_path, library=Library(peers=peers))["peer access"]
    assert finding.verdict is Verdict.FAIL
    assert "nvidia-smi topo" in (finding.cure or "")


def test_a_driver_that_is_not_there_says_so_and_ends_the_rest(tmp_path: Path) -> None:
    def load() -> CudaDriver:
        raise CudaUnavailableError(
            call="loading libcuda.so.1",
            status=None,
            meaning="there is no driver",
            hint="install it",
        )

    found = examine(tmp_path, load=load)
    assert list(found) == ["driver"]
    assert (found["driver"].verdict, found["driver"].cure) == (Verdict.FAIL, "install it")


def test_a_driver_that_fails_is_told_by_its_status(tmp_path: Path) -> None:
    finding = examine(tmp_path, library=Library(status=802))["driver"]
    assert finding.verdict is Verdict.FAIL
    assert "fabric manager" in (finding.cure or "")


@pytest.mark.parametrize(
    ("device", "fault"), [("cuda:7", "none of them"), ("GPU-aaaaaa", "several of them")]
)
def test_a_device_that_names_no_one_gpu_is_told(tmp_path: Path, device: str, fault: str) -> None:
    library = Library(names=(b"A", b"B"))
    if device == "GPU-aaaaaa":
        finding = examine(tmp_path, "GPU-aaaaaa", "cuda:1", library)["prefilld.device"]
    else:
        finding = examine(tmp_path, "cuda:0", device, library)["decoded.device"]
    assert finding.verdict is Verdict.FAIL
    assert fault in finding.text


def test_libraries_that_cannot_be_imported_are_told(tmp_path: Path) -> None:
    found = examine(tmp_path, run=lambda _: None)
    assert found["CuPy"].verdict is found["torch"].verdict is Verdict.FAIL
    assert "cuda13" in (found["CuPy"].cure or "")


def test_a_torch_without_cuda_is_told(tmp_path: Path) -> None:
    found = examine(tmp_path, run=lambda program: "2.13.0+cpu none")
    assert found["torch"].verdict is Verdict.FAIL
    assert "2.13.0+cpu is built without CUDA" in found["torch"].text


def test_a_missing_compiler_is_told(tmp_path: Path) -> None:
    """Triton finds out only when the first kernel is built, minutes later."""
    found = examine(tmp_path, find_program=lambda _: None)
    assert found["C compiler"].verdict is Verdict.FAIL


def test_another_interpreter_is_asked_for_what_may_crash(tmp_path: Path) -> None:
    """This machine's torch, for real."""
    arguments = {"load": Library().driver, "find_program": lambda name: name}
    findings = check_gpus(config(tmp_path, "cuda", "cuda"), **arguments)  # type: ignore[arg-type]
    torch = next(finding for finding in findings if finding.check == "torch")
    assert torch.text != "cannot be imported"
