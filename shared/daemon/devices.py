"""Which GPU a configured name means, in this process and to the other daemon.

An index is private to a process: it counts what `CUDA_VISIBLE_DEVICES` leaves, and CUDA's order is
not nvidia-smi's.  So the daemons know each other's GPU by its UUID, and logs tell it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from shared.errors import EnvironmentUnsupportedError
from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_preflight import inspect, require
from shared.kv.errors import CudaCallError, CudaNotReadyError
from shared.kv.machine_probe import MachineProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from structlog.typing import FilteringBoundLogger

    from shared.kv.cuda_preflight import Probe

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where a daemon computes."""

    name: str
    """The GPU's UUID, or `cpu`: what HELLO says of it."""
    index: int | None
    """The GPU's number in this process; None on the CPU."""
    driver: str = field(default="", compare=False)
    """The newest CUDA that this process's driver speaks, such as `13.0`; empty on the CPU."""

    @property
    def torch_device(self) -> torch.device:
        """The same, as torch takes it."""
        return torch.device(CPU) if self.index is None else torch.device("cuda", self.index)


CPU_DEVICE = Device(name=CPU, index=None)


class GpuList(Protocol):
    """The GPUs that this process sees; `CudaDriver` is one."""

    def version(self) -> str:
        """The newest CUDA that the driver speaks."""

    def num_devices(self) -> int:
        """How many there are."""

    def device_uuid(self, index: int) -> str:
        """A GPU's identity, `GPU-…` or `MIG-…`."""


def require_device(
    text: str, *, peer: str, log: FilteringBoundLogger, probe: Probe | None = None
) -> Device:
    """Return the device that a daemon is to use, once nothing stands in its way.

    Args:
        text: What is configured for this daemon; see `resolve_device`.
        peer: What is configured for the other one.  A name that means nothing in this process,
            whose view may differ, is passed over: HELLO tells the UUID.
        log: Gets a line for what does not stand in the way and should be known.
        probe: The machine; None looks at this one.

    Raises:
        EnvironmentUnsupportedError: The pool cannot work on it; the message names why, and the
            hint what to do.
        CudaNotReadyError: The driver is not ready yet, as at boot.
    """
    if text == CPU:
        return resolve_device(text)
    probe = probe or MachineProbe()
    try:
        device = resolve_device(text, load=probe.gpus)
    except CudaNotReadyError:
        raise
    except CudaCallError:
        # The driver's own words are often only that it does not start.
        require(inspect(probe, device=text))
        raise
    try:
        theirs = resolve_device(peer, load=probe.gpus).name
    except EnvironmentUnsupportedError:
        theirs = None
    findings = inspect(probe, device=device.name, peer=theirs)
    require(findings)
    for finding in findings:
        log.warning("device.noted", code=finding.code, reason=str(finding))
    log.info(
        "device.chosen", device=text, uuid=device.name, index=device.index, driver=device.driver
    )
    return device


def resolve_device(text: str, *, load: Callable[[], GpuList] = CudaDriver.load) -> Device:
    """Return the device that a configured name means.

    Args:
        text: `cpu`, `cuda` (the first GPU), `cuda:N`, or a GPU's UUID or its beginning.
        load: Loads the driver; called for a GPU only.

    Raises:
        CudaUnavailableError: There is no driver, or it does not start.
        EnvironmentUnsupportedError: No GPU that this process sees is the one, or several are.
    """
    if text == CPU:
        return CPU_DEVICE
    gpus = load()
    uuids = [gpus.device_uuid(index) for index in range(gpus.num_devices())]
    if text.startswith("cuda"):
        wanted = int(text.partition(":")[2] or 0)
        found = [wanted] if wanted < len(uuids) else []
    else:
        prefix = text.casefold()
        found = [index for index, uuid in enumerate(uuids) if uuid.casefold().startswith(prefix)]
    if len(found) != 1:
        fault = "names several GPUs" if found else "is not among the GPUs that this process sees"
        listed = ", ".join(f"cuda:{index} = {uuid}" for index, uuid in enumerate(uuids))
        raise EnvironmentUnsupportedError(
            f"device {text!r} {fault}: {listed or 'none'}",
            hint="choose one of them, or see CUDA_VISIBLE_DEVICES and the /dev/nvidia* nodes",
        )
    (index,) = found
    return Device(name=uuids[index], index=index, driver=gpus.version())
