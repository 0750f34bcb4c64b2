"""Tests of shared/kv/nvml.py, over a library and a program that only look like NVIDIA's."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.kv.nvml import Holder, is_foreign, is_nvlink, memory_holders

UUID = "GPU-one"


class NVMLError(Exception):
    pass


class NotFoundError(NVMLError):
    pass


class Library(SimpleNamespace):
    """pynvml; `fails` names the call that raises, or the GPU that it does not know."""

    NVMLError = NVMLError
    NVMLError_NotFound = NotFoundError

    def __init__(self, *, fails: str = "", status: int = 0) -> None:
        super().__init__(fails=fails, status=status, open=0)

    def nvmlInit(self) -> None:
        if self.fails == "init":
            raise NVMLError
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if self.fails == "handle":
            raise NVMLError
        if self.fails == uuid:
            raise NotFoundError
        return f"handle of {uuid}"

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        assert handle == f"handle of {UUID}"
        return [
            SimpleNamespace(pid=os.getpid(), usedGpuMemory=5),
            SimpleNamespace(pid=1 << 30, usedGpuMemory=None),
        ]

    def nvmlDeviceGetP2PStatus(self, one: str, two: str, index: int) -> int:
        assert (one, two, index) == (f"handle of {UUID}", "handle of GPU-two", 2)
        return self.status


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:  # noqa: ANN401 - a function
    """Install a library (None: there is none) and a nvidia-smi that prints a text."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def install(library: Library | None, prints: str | None = None, status: int = 0) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        if prints is not None:
            program = tmp_path / "nvidia-smi"
            program.write_text(f"#!/bin/sh\nprintf '{prints}'\nexit {status}\n")
            program.chmod(0o755)

    return install


def test_the_library_tells_who_holds_memory(install: Any) -> None:  # noqa: ANN401 - the fixture
    library = Library()
    install(library)
    holders = memory_holders(UUID)
    comm = Path("/proc/self/comm").read_text().strip()
    assert holders == [Holder(os.getpid(), comm, 5), Holder(1 << 30, None, None)]
    assert library.open == 0, "started and ended"


@pytest.mark.parametrize("fails", ["init", "handle"])
def test_a_library_that_refuses_is_no_error(install: Any, fails: str) -> None:  # noqa: ANN401
    """In many a container it does, and the GPU works all the same."""
    library = Library(fails=fails)
    install(library)
    assert memory_holders(UUID) is None
    assert is_nvlink(UUID, "GPU-two") is None
    assert library.open == 0


def test_without_the_library_the_program_is_asked(install: Any) -> None:  # noqa: ANN401
    """It names every GPU's processes, and in a container no amounts."""
    install(None, prints=f"GPU-two, 5, 1\\n{UUID}, 1073741824, 3\\n{UUID}, 1073741825, [N/A]\\n")
    assert memory_holders(UUID) == [
        Holder(1 << 30, None, 3 << 20),
        Holder((1 << 30) + 1, None, None),
    ]


def test_a_program_that_talks_nonsense_is_not_believed(install: Any) -> None:  # noqa: ANN401
    install(None, prints=f"\\n{UUID}\\n{UUID}, x, y\\n")
    assert memory_holders(UUID) == []


def test_a_program_that_fails_or_is_missing_tells_nothing(install: Any) -> None:  # noqa: ANN401
    install(None)
    assert memory_holders(UUID) is None
    install(None, prints="no devices", status=6)
    assert memory_holders(UUID) is None
    assert is_nvlink(UUID, "GPU-two") is None


@pytest.mark.parametrize(("status", "answer"), [(0, True), (1, False)])
def test_two_gpus_are_linked_or_not(install: Any, status: int, answer: bool) -> None:  # noqa: ANN401
    install(Library(status=status))
    assert is_nvlink(UUID, "GPU-two") is answer


@pytest.mark.parametrize(
    ("fails", "answer"),
    [("", False), ("GPU-two", True), (UUID, False), ("handle", False), ("init", False)],
)
def test_a_gpu_is_foreign_only_to_a_library_that_knows_ours(
    install: Any,  # noqa: ANN401 - the fixture
    fails: str,
    answer: bool,
) -> None:
    """In a container it may see less than CUDA does."""
    library = Library(fails=fails)
    install(library)
    assert is_foreign(UUID, "GPU-two") is answer
    assert library.open == 0


def test_without_the_library_no_gpu_is_foreign(install: Any) -> None:  # noqa: ANN401
    install(None)
    assert not is_foreign(UUID, "GPU-two")
