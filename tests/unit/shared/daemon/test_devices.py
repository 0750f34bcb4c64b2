"""Tests of shared/daemon/devices.py."""

from __future__ import annotations

import pytest
import torch

from shared.daemon.devices import Device, resolve_device
from shared.errors import EnvironmentUnsupportedError

ONE = "GPU-aa00aa00-0000-1111-2222-333344445555"
TWO = "GPU-aa11aa11-0000-1111-2222-333344445555"


class Gpus:
    def __init__(self, *uuids: str) -> None:
        self.uuids = uuids

    def num_devices(self) -> int:
        return len(self.uuids)

    def device_uuid(self, index: int) -> str:
        return self.uuids[index]


def load() -> Gpus:
    return Gpus(ONE, TWO)


def load_nothing() -> Gpus:
    raise AssertionError("a CPU needs no driver")


def test_the_cpu_needs_no_driver() -> None:
    device = resolve_device("cpu", load=load_nothing)
    assert device == Device(name="cpu", index=None)
    assert device.torch_device == torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("cuda", 0),
        ("cuda:0", 0),
        ("cuda:1", 1),
        (TWO, 1),
        (TWO.lower(), 1),
        ("GPU-AA11", 1),
    ],
)
def test_a_gpu_is_found_and_known_by_its_uuid(text: str, index: int) -> None:
    """The other daemon may see it under another number."""
    device = resolve_device(text, load=load)
    assert device == Device(name=(ONE, TWO)[index], index=index)
    assert device.torch_device == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cuda:2", f"'cuda:2' is not among the GPUs that this process sees: cuda:0 = {ONE}, "),
        ("GPU-bb", "'GPU-bb' is not among"),
        ("MIG-aa00", "'MIG-aa00' is not among"),
        ("GPU-aa", "'GPU-aa' names several GPUs: cuda:0"),
    ],
)
def test_a_name_that_is_not_one_gpu_is_refused_with_those_there_are(
    text: str, message: str
) -> None:
    with pytest.raises(EnvironmentUnsupportedError, match=message):
        resolve_device(text, load=load)


def test_no_gpu_at_all_is_said_so() -> None:
    """As with a CUDA_VISIBLE_DEVICES that is empty or begins with a mistake."""
    with pytest.raises(EnvironmentUnsupportedError, match=r"sees: none; .*CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda", load=Gpus)
