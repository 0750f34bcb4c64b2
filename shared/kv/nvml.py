"""What NVIDIA's management library tells of GPUs: who holds their memory, and how they are linked.

All of it is advice for people and defaults: where the library is missing or refuses (as in many a
container), the answer is None and nothing fails.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NVIDIA_SMI_TIMEOUT_S = 5.0
"""It takes under a second; on a machine whose GPU hangs it never ends."""

MIB = 1 << 20

_P2P_NVLINK = 2
"""`NVML_P2P_CAPS_INDEX_NVLINK`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process with memory on a GPU."""

    pid: int
    name: str | None
    used_bytes: int | None
    """None where the driver does not tell, as in a container."""

    def __str__(self) -> str:
        used = "some" if self.used_bytes is None else f"{self.used_bytes / MIB:,.0f} MiB"
        return f"{self.name or 'process'} {self.pid} ({used})"


def memory_holders(uuid: str) -> list[Holder] | None:
    """Return who holds memory on a GPU, or None where nobody tells.

    Asks nvidia-ml-py where it is installed, and nvidia-smi otherwise.
    """
    with _nvml() as nvml:
        if nvml is not None:
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
                running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except nvml.NVMLError:
                return None
            return [Holder(item.pid, _name_of(item.pid), item.usedGpuMemory) for item in running]
    return _ask_nvidia_smi(uuid)


def describe_holders(holders: list[Holder] | None) -> str:
    """Say in words who holds a GPU's memory."""
    if holders is None:
        return "who holds the rest is not known here; see nvidia-smi on the host"
    if not holders:
        return "no process that is visible here holds the rest"
    return "it is held by " + ", ".join(map(str, holders))


def is_nvlink(uuid: str, peer: str) -> bool | None:
    """Whether two GPUs reach each other by NVLink, or None where nobody tells."""
    with _nvml() as nvml:
        if nvml is None:
            return None
        try:
            one, two = (nvml.nvmlDeviceGetHandleByUUID(name) for name in (uuid, peer))
            return bool(nvml.nvmlDeviceGetP2PStatus(one, two, _P2P_NVLINK) == 0)
        except nvml.NVMLError:
            return None


def is_foreign(uuid: str, peer: str) -> bool:
    """Whether a peer's GPU is none of this machine's, as far as the library can tell.

    Args:
        uuid: A GPU that this process uses.  Where the library does not know that one either, it
            sees less than CUDA does, and its word does not count.
        peer: The GPU in question.
    """
    with _nvml() as nvml:
        if nvml is None:
            return False
        try:
            nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError:
            return False
        try:
            nvml.nvmlDeviceGetHandleByUUID(peer)
        except nvml.NVMLError_NotFound:
            return True
        except nvml.NVMLError:
            return False
    return False


@contextmanager
def _nvml() -> Iterator[Any]:
    """Yield the library's module, started, or None."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield None
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _ask_nvidia_smi(uuid: str) -> list[Holder] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = "--query-compute-apps=gpu_uuid,pid,used_memory"
    try:
        answer = subprocess.run(  # noqa: S603  found on the PATH, and nobody else's words in it
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            check=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    holders = []
    for line in answer.splitlines():
        device, pid, used = (field.strip() for field in (*line.split(","), "", "")[:3])
        if device == uuid and pid.isdecimal():
            used_bytes = int(used) * MIB if used.isdecimal() else None  # otherwise "[N/A]"
            holders.append(Holder(int(pid), _name_of(int(pid)), used_bytes))
    return holders


def _name_of(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
