"""Looks, before anything is loaded, for what would make the CUDA pool fail later, and names it.

Nothing here changes anything; what is looked at comes from a `Probe`, so that every finding can be
had without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shared.errors import EnvironmentUnsupportedError
from shared.kv.c_compiler import INSTALL_HINT
from shared.kv.cuda_runtime import cupy_hint
from shared.kv.errors import CudaCallError
from shared.kv.nvml import describe_holders

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shared.kv.cuda_runtime import Memory
    from shared.kv.nvml import Holder

NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""What the driver opens whatever the GPU; `/dev/nvidiaN` is each GPU's own."""

PROHIBITED, EXCLUSIVE = 2, 3
"""CUDA's compute modes in which not everybody may use a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about this machine that matters to the pool."""

    code: str
    """A stable name."""
    message: str
    hint: str | None = None
    is_fatal: bool = True
    """The pool cannot work; otherwise it can, and somebody should know all the same."""

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class Gpus(Protocol):
    """The GPUs that this process sees, as the driver tells of them; `CudaDriver` is one."""

    def version(self) -> str:
        """The newest CUDA that the driver speaks."""

    def num_devices(self) -> int:
        """How many there are."""

    def device_uuid(self, index: int) -> str:
        """A GPU's identity, `GPU-…` or `MIG-…`."""

    def compute_mode(self, index: int) -> int:
        """Who may use a GPU."""

    def can_access_peer(self, index: int, peer: int) -> bool:
        """Whether one reads the other's memory."""


class Probe(Protocol):
    """What is looked at; `shared.kv.machine_probe` does it for real."""

    @property
    def environ(self) -> Mapping[str, str]:
        """This process's environment."""

    def read(self, path: str) -> str | None:
        """A file's text, or None where it cannot be read."""

    def node_fault(self, path: str) -> str | None:
        """Why a device node does not open, or None where it does."""

    def gpus(self) -> Gpus:
        """Start the driver.

        Raises:
            CudaCallError: There is none, or it does not start.
        """

    def cupy_fault(self) -> str | None:
        """Why CuPy does not import, or None where it does."""

    def compiler_fault(self) -> str | None:
        """Why a C file with Python's headers does not compile, or None where it does."""

    @property
    def torch_cuda(self) -> str | None:
        """The CUDA that torch was built for, or None."""

    def memory(self, index: int) -> Memory:
        """How much memory a GPU has."""

    def holders(self, uuid: str) -> list[Holder] | None:
        """Who holds memory on a GPU."""


def inspect(
    probe: Probe, *, device: str, peer: str | None = None, min_free_bytes: int = 0
) -> list[Finding]:
    """Return what stands in the way of a pool, or should be known about it, worst first.

    Args:
        probe: What to look at.
        device: UUID of the GPU that this daemon uses.
        peer: UUID of the other daemon's; None where it is not known.
        min_free_bytes: What this daemon is going to allocate at least.
    """
    findings = [*_platform(probe), *_software(probe)]
    try:
        gpus = probe.gpus()
        if not any(finding.is_fatal for finding in findings):
            uuids = [gpus.device_uuid(index) for index in range(gpus.num_devices())]
            findings += _devices(gpus, uuids, device, peer)
            if device in uuids:
                findings += _memory(probe, uuids.index(device), device, min_free_bytes)
    except CudaCallError as error:
        nodes = list(_nodes(probe))
        findings += nodes or [Finding(code="driver", message=str(error))]
    findings += _notes(probe)
    return sorted(findings, key=lambda finding: not finding.is_fatal)


def require(findings: Sequence[Finding]) -> None:
    """Refuse to start where a finding is fatal.

    Raises:
        EnvironmentUnsupportedError: The first of them, in its own words.
    """
    for finding in findings:
        if finding.is_fatal:
            raise EnvironmentUnsupportedError(finding.message, hint=finding.hint)


def _platform(probe: Probe) -> Iterator[Finding]:
    """Kinds of machine whose driver lacks CUDA IPC."""
    if "microsoft" in (probe.read("/proc/version") or "").lower():
        yield Finding(
            code="wsl",
            message="this is WSL, whose driver cannot open another process's memory",
            hint='run on Linux itself, or set both devices to "cpu"',
        )
    if "tegra" in (probe.read("/proc/device-tree/compatible") or ""):
        yield Finding(
            code="tegra",
            message="this is a Tegra, whose driver has no CUDA IPC",
            hint='set both devices to "cpu"',
        )


def _software(probe: Probe) -> Iterator[Finding]:
    """Libraries that are missing or do not fit each other."""
    if probe.torch_cuda is None:
        yield Finding(
            code="torch",
            message="this torch is built for CPUs",
            hint="install one that is built for CUDA",
        )
    elif (fault := probe.cupy_fault()) is not None:
        yield Finding(
            code="cupy", message=f"CuPy is missing: {fault}", hint=cupy_hint(probe.torch_cuda)
        )
    if (fault := probe.compiler_fault()) is not None:
        yield Finding(
            code="c-compiler",
            message=f"Triton cannot build what launches its kernels: {fault}",
            hint=INSTALL_HINT,
        )


def _nodes(probe: Probe) -> Iterator[Finding]:
    """Why the driver does not start, as far as its device nodes tell."""
    for path in NODES:
        fault = probe.node_fault(path)
        if fault is not None:
            yield Finding(
                code="device-nodes",
                message=f"{path} does not open: {fault}",
                hint="let this process have it: DeviceAllow=, PrivateDevices=no, the container's "
                "GPU option, the video group; `nvidia-modprobe -u -c=0` makes missing nodes",
            )
    if probe.read("/proc/driver/nvidia/version") is None:
        yield Finding(
            code="proc",
            message="/proc/driver/nvidia is not readable, and the driver needs it",
            hint="load the nvidia module, and set ProcSubset=all",
        )


def _devices(gpus: Gpus, uuids: list[str], device: str, peer: str | None) -> Iterator[Finding]:
    """What the driver tells of the daemons' GPUs."""
    if device not in uuids:
        yield Finding(
            code="no-device",
            message=f"GPU {device} is not among those that this process sees: "
            f"{', '.join(uuids) or 'none'}",
            hint="see CUDA_VISIBLE_DEVICES and the /dev/nvidia* nodes",
        )
        return
    index, is_shared = uuids.index(device), peer == device
    mode = gpus.compute_mode(index)
    if mode == PROHIBITED or (mode == EXCLUSIVE and is_shared):
        whom = "nobody" if mode == PROHIBITED else "one process, and two daemons are to use it"
        yield Finding(
            code="compute-mode",
            message=f"GPU {device} is set to be used by {whom}",
            hint="nvidia-smi -c DEFAULT",
        )
    elif mode == EXCLUSIVE:
        yield Finding(
            code="compute-mode",
            message=f"GPU {device} is set to be used by one process, and the other daemon opens "
            "its memory",
            hint="if that fails: nvidia-smi -c DEFAULT",
            is_fatal=False,
        )
    if peer is None or is_shared:
        return
    if device.startswith("MIG-") or peer.startswith("MIG-"):
        yield Finding(
            code="mig",
            message=f"{device} and {peer} are parts of GPUs, which cannot read each other's memory",
            hint="give both daemons one instance, or two whole GPUs",
        )
    elif peer not in uuids:
        yield Finding(
            code="hidden-peer",
            message=f"the other daemon's GPU, {peer}, is not visible here",
            hint="CUDA_VISIBLE_DEVICES may hide it, but its device node must be there",
            is_fatal=False,
        )
    elif not gpus.can_access_peer(index, uuids.index(peer)):
        yield Finding(
            code="peer-access",
            message=f"{device} and {peer} have no peer access to each other",
            hint="use one GPU for both daemons, or another pair (nvidia-smi topo -p2p r)",
        )


def _memory(probe: Probe, index: int, device: str, min_free_bytes: int) -> Iterator[Finding]:
    """Whether there is room, and who has it otherwise."""
    if not min_free_bytes:
        return
    memory = probe.memory(index)
    if memory.free < min_free_bytes:
        yield Finding(
            code="memory",
            message=f"{memory.free} of the {memory.total} bytes of GPU {device} are free, and "
            f"{min_free_bytes} are needed",
            hint=describe_holders(probe.holders(device)),
        )


def _notes(probe: Probe) -> Iterator[Finding]:
    """What works, and should be known when something else does not."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in probe.environ.get(name, "").lower().replace(" ", ""):
            yield Finding(
                code="expandable-segments",
                message=f"{name} sets expandable_segments: memory of that kind cannot be exported",
                hint="the pool is not torch's, so it does not matter here",
                is_fatal=False,
            )
    if "CUDA_MPS_PIPE_DIRECTORY" in probe.environ:
        yield Finding(
            code="mps",
            message="the daemons are clients of MPS: a fault of one ends the other as well",
            is_fatal=False,
        )
