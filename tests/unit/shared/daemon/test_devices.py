"""Tests of shared/daemon/devices.py."""

from __future__ import annotations

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from shared.daemon.devices import Device, require_device, resolve_device
from shared.errors import EnvironmentUnsupportedError
from shared.kv.errors import CudaNotReadyError
from tests.support.fake_machine import Machine

ONE = "GPU-aa00aa00-0000-1111-2222-333344445555"
TWO = "GPU-aa11aa11-0000-1111-2222-333344445555"


class Gpus:
    def __init__(self, *uuids: str) -> None:
        self.uuids = uuids

    def version(self) -> str:
        return "13.0"

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
    assert device.driver == "13.0"


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


def required(text: str, peer: str, machine: Machine) -> Device:
    return require_device(text, peer=peer, log=structlog.get_logger(), probe=machine)


def test_a_device_is_chosen_once_nothing_stands_in_its_way() -> None:
    """And what should be known is told."""
    machine = Machine(environ={"CUDA_MPS_PIPE_DIRECTORY": "/x"})
    with capture_logs() as logs:
        device = required("cuda:1", "cuda:0", machine)
    assert device == Device(name="GPU-two", index=1)
    assert [(entry["event"], entry.get("code")) for entry in logs] == [
        ("device.noted", "mps"),
        ("device.chosen", None),
    ]
    assert (logs[-1]["uuid"], logs[-1]["driver"]) == ("GPU-two", "13.0")


def test_a_device_that_the_pool_cannot_use_stops_the_start() -> None:
    """Before a model is loaded for minutes."""
    with pytest.raises(EnvironmentUnsupportedError, match=r"no peer access .*; use one GPU"):
        required("cuda:0", "cuda:1", Machine(peers=False))


def test_a_peer_that_this_process_cannot_name_is_passed_over() -> None:
    """It may see other GPUs than we do."""
    machine = Machine(uuids=("GPU-one",), peers=False)
    assert required("cuda:0", "cuda:1", machine).index == 0


def test_a_driver_that_does_not_start_is_told_by_what_is_wrong() -> None:
    """Its own words are `unknown error`."""
    machine = Machine(driver_status=999, node_faults={"/dev/nvidia-uvm": "Operation not permitted"})
    with pytest.raises(EnvironmentUnsupportedError, match="nvidia-uvm does not open: Operation"):
        required("cuda", "cuda", machine)


def test_a_driver_that_is_not_ready_yet_is_waited_for_by_another_start() -> None:
    """At boot the fabric manager may come up after us; nothing of the machine is amiss."""
    with pytest.raises(CudaNotReadyError, match="not ready yet"):
        required("cuda", "cuda", Machine(driver_status=802))


def test_a_cpu_is_not_inspected() -> None:
    machine = Machine(driver_status=999, torch_cuda=None)
    with capture_logs() as logs:
        assert required("cpu", "cpu", machine).index is None
    assert logs == []
