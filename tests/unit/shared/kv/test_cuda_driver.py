"""Tests of shared/kv/cuda_driver.py, over a library that only looks like the driver's."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from shared.kv import cuda_driver
from shared.kv.cuda_driver import AddressRange, CudaDriver
from shared.kv.errors import CudaCallError, CudaUnavailableError, GpuFatalError


def make_driver(*, text: bytes | None = b"what it says", **functions: Any) -> CudaDriver:  # noqa: ANN401
    def error_string(_: int, answer: Any) -> int:  # noqa: ANN401 - ctypes.byref has no type
        answer._obj.value = text
        return 0 if text is not None else 1

    def query(_: int) -> int:
        return 0

    library = SimpleNamespace(cuGetErrorString=error_string, **{"cuEventQuery": query} | functions)
    return CudaDriver(library)  # type: ignore[arg-type]


def constant(status: int) -> Any:  # noqa: ANN401 - any of the driver's functions
    def function(*_: object) -> int:
        return status

    return function


@pytest.mark.parametrize(("status", "is_done"), [(0, True), (600, False)])
def test_an_event_is_done_or_not_ready(status: int, is_done: bool) -> None:
    assert make_driver(cuEventQuery=constant(status)).is_event_done(5) is is_done


@pytest.mark.parametrize("status", [1, 400, 700, 4711])
def test_anything_else_an_event_says_is_fatal(status: int) -> None:
    """A poller that took it for `not ready` would wait for ever."""
    with pytest.raises(GpuFatalError, match=f"cuEventQuery failed with CUDA error {status}"):
        make_driver(cuEventQuery=constant(status)).is_event_done(5)


def test_an_event_is_passed_as_a_pointer() -> None:
    """As an int, ctypes would cut it to 32 bits."""
    query = constant(0)
    make_driver(cuEventQuery=query)
    assert query.argtypes == [ctypes.c_void_p]


@pytest.mark.parametrize(("number", "told"), [(13000, "13.0"), (12080, "12.8"), (11040, "11.4")])
def test_the_version_is_told_as_people_know_it(number: int, told: str) -> None:
    def get_version(answer: Any) -> int:  # noqa: ANN401
        answer._obj.value = number
        return 0

    assert make_driver(cuDriverGetVersion=get_version).version() == told


def test_a_range_is_told() -> None:
    def get_range(base: Any, size: Any, address: ctypes.c_uint64) -> int:  # noqa: ANN401
        base._obj.value, size._obj.value = address.value - 512, 1 << 40
        return 0

    driver = make_driver(cuMemGetAddressRange_v2=get_range)
    assert driver.address_range(1 << 47) == AddressRange((1 << 47) - 512, 1 << 40)


def test_what_the_driver_does_not_tell_is_none() -> None:
    driver = make_driver(cuMemGetAddressRange_v2=constant(1), cuPointerGetAttribute=constant(801))
    assert driver.address_range(4096) is None
    assert driver.is_exportable(4096) is None


def test_a_lost_gpu_is_not_taken_for_an_old_driver() -> None:
    driver = make_driver(cuMemGetAddressRange_v2=constant(700), cuPointerGetAttribute=constant(700))
    with pytest.raises(GpuFatalError, match="illegal address"):
        driver.address_range(4096)
    with pytest.raises(GpuFatalError, match="illegal address"):
        driver.is_exportable(4096)


@pytest.mark.parametrize("answer", [0, 1])
def test_memory_says_whether_it_can_be_exported(answer: int) -> None:
    def attribute(out: Any, which: int, _: ctypes.c_uint64) -> int:  # noqa: ANN401
        out._obj.value = answer
        return 0 if which == 10 else 1

    assert make_driver(cuPointerGetAttribute=attribute).is_exportable(4096) is bool(answer)


@pytest.mark.parametrize(
    ("name", "kind"), [(b"NVIDIA H200", "GPU"), (b"NVIDIA A100-SXM4-40GB MIG 1g.5gb", "MIG")]
)
def test_a_gpu_is_known_by_all_16_bytes_of_its_uuid(name: bytes, kind: str) -> None:
    """A zero among them ends nothing, and a part of a GPU says that it is one."""
    raw = bytes.fromhex("00112233445566778899aabbccddee00")

    def get_device(out: Any, index: int) -> int:  # noqa: ANN401
        out._obj.value = index + 40
        return 0

    def get_uuid(out: Any, device: ctypes.c_int) -> int:  # noqa: ANN401
        assert device.value == 41
        out.raw = raw
        return 0

    def get_name(out: Any, _: int, device: ctypes.c_int) -> int:  # noqa: ANN401
        assert device.value == 41
        out.value = name
        return 0

    driver = make_driver(
        cuDeviceGet=get_device, cuDeviceGetUuid_v2=get_uuid, cuDeviceGetName=get_name
    )
    assert driver.device_uuid(1) == f"{kind}-00112233-4455-6677-8899-aabbccddee00"


def test_devices_are_counted() -> None:
    def get_count(out: Any) -> int:  # noqa: ANN401
        out._obj.value = 2
        return 0

    assert make_driver(cuDeviceGetCount=get_count).num_devices() == 2


def test_an_unknown_status_is_told_in_the_drivers_words() -> None:
    with pytest.raises(CudaCallError, match="CUDA error 4711: what it says"):
        make_driver(cuInit=constant(4711)).call("cuInit", 0)
    with pytest.raises(CudaCallError, match="CUDA error 4711: an error not known here"):
        make_driver(cuInit=constant(4711), text=None).call("cuInit", 0)


def test_a_machine_without_a_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not.so.1")
    with pytest.raises(CudaUnavailableError, match="there is no NVIDIA driver here; install it"):
        CudaDriver.load()
