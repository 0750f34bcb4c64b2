"""What the daemons will find of the GPUs, for `kvpair doctor`, in a process of its own.

    python -P -m shared.daemon.gpu_report cuda:0 cuda:1

prints one JSON object.  It imports what the daemons import, torch and CuPy, which takes seconds and
may crash; whoever asks survives that.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, TypedDict

from shared.daemon.devices import Device, resolve_device
from shared.errors import EnvironmentUnsupportedError
from shared.kv.cuda_preflight import Finding, inspect
from shared.kv.errors import CudaCallError
from shared.kv.machine_probe import MachineProbe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shared.kv.cuda_preflight import Probe


class Row(TypedDict):
    """One finding."""

    code: str
    message: str
    hint: str | None
    is_fatal: bool


class Report(TypedDict):
    """What is printed."""

    torch_cuda: str | None
    """The CUDA that torch was built for."""
    gpus: list[str]
    """UUIDs of those that this process sees; empty where the driver does not start."""
    findings: list[Row]


def report(devices: Sequence[str], probe: Probe) -> Report:
    """Return what stands in the way of a pair.

    Args:
        devices: What is configured, prefilld's and decoded's.
        probe: The machine.
    """
    findings: list[Finding] = []
    found: list[Device] = []
    uuids: list[str] = []
    try:
        gpus = probe.gpus()
        uuids = [gpus.device_uuid(index) for index in range(gpus.num_devices())]
        for text in devices:
            try:
                found.append(resolve_device(text, load=probe.gpus))
            except EnvironmentUnsupportedError as error:
                findings.append(Finding(code="device", message=error.message, hint=error.hint))
    except CudaCallError as error:
        # The driver's own words are often only that it does not start.
        named = inspect(probe, device=devices[0])
        findings += named or [Finding(code="driver", message=str(error))]
    if len(found) == len(devices):
        ours, theirs = found
        findings += inspect(probe, device=ours.name, peer=theirs.name)
        findings += inspect(probe, device=theirs.name, peer=ours.name)
    return Report(
        torch_cuda=probe.torch_cuda,
        gpus=uuids,
        findings=[
            Row(
                code=finding.code,
                message=finding.message,
                hint=finding.hint,
                is_fatal=finding.is_fatal,
            )
            for finding in dict.fromkeys(findings)  # both daemons find most of it
        ],
    )


if __name__ == "__main__":
    sys.stdout.write(json.dumps(report(sys.argv[1:3], MachineProbe())))
