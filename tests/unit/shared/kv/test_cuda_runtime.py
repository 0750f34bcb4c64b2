"""Tests of shared/kv/cuda_runtime.py, over a module that only looks like CuPy's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_runtime import CupyRuntime, Memory, cupy_hint
from shared.kv.errors import CudaCallError, CudaUnavailableError, GpuFatalError, GpuMemoryError


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int | None) -> None:
        super().__init__("cudaErrorOfSomeKind: what it says")
        self.status = status


class Cupy:
    """Notes every call; `status` makes each fail."""

    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fails = False
        self.status: int | None = 1

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any of the module's functions
        answers: dict[str, Any] = {
            "malloc": 4096,
            "ipcGetMemHandle": b"m" * 64,
            "ipcGetEventHandle": b"e" * 64,
            "ipcOpenMemHandle": 8192,
            "ipcOpenEventHandle": 7,
            "eventCreateWithFlags": 6,
            "memGetInfo": (1, 2),
        }

        def function(*arguments: object) -> Any:  # noqa: ANN401
            self.calls.append((name, *arguments))
            if self.fails:
                raise CUDARuntimeError(self.status)
            return answers.get(name)

        function.__name__ = name
        return function


@pytest.fixture
def cupy() -> Cupy:
    return Cupy()


@pytest.fixture
def runtime(cupy: Cupy) -> CupyRuntime:
    driver = CudaDriver(SimpleNamespace(cuEventQuery=lambda _: 0))  # type: ignore[arg-type]
    return CupyRuntime(cupy, driver)


def test_every_call_reaches_cupy_with_the_flags_that_ipc_needs(
    cupy: Cupy, runtime: CupyRuntime
) -> None:
    """Events without timing and for other processes; memory opened with lazy peer access."""
    runtime.use_device(1)
    assert runtime.allocate(10) == 4096
    assert runtime.export_memory(4096) == b"m" * 64
    assert runtime.open_memory(b"h" * 64) == 8192
    runtime.close_memory(8192)
    assert runtime.create_event() == 6
    assert runtime.export_event(6) == b"e" * 64
    assert runtime.open_event(b"h" * 64) == 7
    runtime.record_event(6, 99)
    runtime.destroy_event(6)
    runtime.pin(4096, 10)
    runtime.unpin(4096)
    runtime.free(4096)
    runtime.synchronize()
    assert runtime.memory() == Memory(free=1, total=2)
    assert runtime.is_event_done(6)
    assert cupy.calls == [
        ("setDevice", 1),
        ("malloc", 10),
        ("ipcGetMemHandle", 4096),
        ("ipcOpenMemHandle", b"h" * 64, 1),
        ("ipcCloseMemHandle", 8192),
        ("eventCreateWithFlags", 6),
        ("ipcGetEventHandle", 6),
        ("ipcOpenEventHandle", b"h" * 64),
        ("eventRecord", 6, 99),
        ("eventDestroy", 6),
        ("hostRegister", 4096, 10, 0),
        ("hostUnregister", 4096),
        ("free", 4096),
        ("deviceSynchronize",),
        ("memGetInfo",),
    ]


@pytest.mark.parametrize(
    ("status", "error"),
    [(700, GpuFatalError), (217, CudaUnavailableError), (2, GpuMemoryError)],
)
def test_cupys_errors_become_ours_with_the_calls_name(
    cupy: Cupy, runtime: CupyRuntime, status: int, error: type[CudaCallError]
) -> None:
    cupy.fails, cupy.status = True, status
    with pytest.raises(error, match=f"ipcOpenMemHandle failed with CUDA error {status}"):
        runtime.open_memory(b"h" * 64)


def test_an_error_without_a_status_keeps_its_words(cupy: Cupy, runtime: CupyRuntime) -> None:
    cupy.fails, cupy.status = True, None
    with pytest.raises(CudaCallError, match="malloc failed: cudaErrorOfSomeKind"):
        runtime.allocate(1)


def test_a_view_that_is_a_copy_is_refused(
    runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch has been seen to copy a GPU's memory to the CPU in silence."""
    monkeypatch.setattr(torch, "as_tensor", lambda *_, **__: torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(CudaCallError, match="copied the memory at 0x1000 to cpu"):
        runtime.view(4096, 4, 0)


def test_memory_is_shown_to_torch_as_bytes_and_on_a_named_device(
    runtime: CupyRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interface's own codes cannot tell bfloat16 from float16."""
    seen: dict[str, Any] = {}

    def as_tensor(span: Any, device: torch.device) -> torch.Tensor:  # noqa: ANN401
        seen.update(span.__cuda_array_interface__, device=device)
        return torch.zeros(4, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(CudaCallError, match="copied"):
        runtime.view(1 << 40, 4, 1)
    assert seen["device"] == torch.device("cuda", 1)
    assert (seen["shape"], seen["typestr"], seen["data"]) == ((4,), "|u1", (1 << 40, False))


def test_a_missing_cupy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDriver, "load", classmethod(lambda _: SimpleNamespace()))
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(CudaUnavailableError, match=r"pip install 'kvpair\[cuda13\]'"):
        CupyRuntime.load()


@pytest.mark.parametrize(
    ("version", "hint"),
    [("12.9", "[cuda]"), ("13.0", "[cuda13]"), (None, "this torch is for CPUs")],
)
def test_the_extra_follows_torch(version: str | None, hint: str) -> None:
    """CuPy and torch must be built for one major version of CUDA."""
    assert hint in cupy_hint(version)
