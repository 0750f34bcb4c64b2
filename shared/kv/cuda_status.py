"""What CUDA's status codes mean to a daemon: lost for good, a matter of set-up, or one failed call.

Pure.  The runtime and the driver number their errors alike.
"""

from __future__ import annotations

from typing import NamedTuple

from shared.kv.errors import (
    CudaCallError,
    CudaNotReadyError,
    CudaUnavailableError,
    GpuFatalError,
    GpuMemoryError,
)

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_DEVICE = 101
OPENED_BY_ITS_MAKER = 201
"""The runtime's name for it is `device uninitialized`; opening one's own handle gives it."""
MAP_FAILED = 205
ALREADY_MAPPED = 208
PEER_ACCESS_UNSUPPORTED = 217
INVALID_HANDLE = 400
NOT_READY = 600


class Meaning(NamedTuple):
    """A status in words, and what to do about it."""

    text: str
    cure: str | None = None


FATAL: dict[int, Meaning] = {
    214: Meaning(
        "the GPU's memory has an uncorrectable ECC error",
        "look for Xid errors in the kernel's log before starting again: it may need a reset",
    ),
    220: Meaning("NVLink has an uncorrectable error", "the machine's GPUs may need a reset"),
    226: Meaning("the GPU contained a fault of this process"),
    700: Meaning("a kernel used an illegal address"),
    702: Meaning("a kernel ran into the display's time limit"),
    709: Meaning("the GPU's context was destroyed"),
    710: Meaning("an assertion failed in a kernel"),
    714: Meaning("a hardware stack error"),
    715: Meaning("a kernel met an illegal instruction"),
    716: Meaning("a kernel used a misaligned address"),
    717: Meaning("a kernel used an address of the wrong space"),
    718: Meaning("a kernel's program counter is invalid"),
    719: Meaning("a kernel failed"),
    721: Meaning("a kernel leaked tensor memory"),
    805: Meaning("the connection to the MPS server failed"),
    806: Meaning("the MPS server does not answer"),
    810: Meaning("the MPS server ended this process's use of the GPU, as another's fault does"),
    999: Meaning("the driver does not know why", "the kernel's log may: look for Xid errors"),
}
"""Statuses after which every call of this process fails.  810: MPS clients share their faults."""

SET_UP: dict[int, Meaning] = {
    3: Meaning("CUDA does not start", "see whether nvidia-smi works for this user"),
    35: Meaning(
        "the driver is older than the CUDA that CuPy and torch were built for",
        "install a newer driver, or builds for an older CUDA",
    ),
    100: Meaning(
        "no GPU is visible", "check nvidia-smi, CUDA_VISIBLE_DEVICES and the /dev/nvidia* nodes"
    ),
    INVALID_DEVICE: Meaning(
        "there is no such GPU here", "check the device's number and CUDA_VISIBLE_DEVICES"
    ),
    MAP_FAILED: Meaning(
        "the other GPU is hidden from this process",
        "give both daemons both GPUs' device nodes; CUDA_VISIBLE_DEVICES may choose among them",
    ),
    PEER_ACCESS_UNSUPPORTED: Meaning(
        "the GPUs have no peer access to each other",
        "use one GPU for both daemons, or another pair (nvidia-smi topo -p2p r)",
    ),
    304: Meaning(
        "the operating system refused the driver something",
        "let the process see /proc/driver/nvidia and write /proc/self/task/*/comm",
    ),
    801: Meaning("this platform does not support it", "WSL, Tegra and vGPU lack CUDA IPC"),
    803: Meaning("the driver's kernel module and its library differ", "restart the machine"),
    804: Meaning("this GPU does not support CUDA's compatibility package", "install the driver"),
}
"""Statuses that an administrator can do something about."""

NOT_READY_YET: dict[int, Meaning] = {
    46: Meaning(
        "the GPU is taken or gives itself to one process alone",
        "set its compute mode to default: nvidia-smi -c DEFAULT",
    ),
    802: Meaning("the system is not ready yet", "start after the fabric manager"),
    807: Meaning("the MPS server is not ready", "start it, or unset CUDA_MPS_PIPE_DIRECTORY"),
    808: Meaning("the MPS server has as many clients as it takes"),
    809: Meaning("the MPS server has as many connections as it takes"),
}
"""The same, of those that may pass by themselves: at boot, or when another process has ended."""

SHORTAGES: dict[int, Meaning] = {OUT_OF_MEMORY: Meaning("the GPU's memory is full")}
"""Statuses of a call that works as soon as others let go of memory."""

OTHERS: dict[int, Meaning] = {
    INVALID_VALUE: Meaning("an argument is not valid"),
    OPENED_BY_ITS_MAKER: Meaning(
        "the driver takes this process for the one that made the handle",
        "two daemons need two pids, as each sees its own",
    ),
    ALREADY_MAPPED: Meaning("the memory is mapped already"),
    INVALID_HANDLE: Meaning("the handle is not valid"),
    NOT_READY: Meaning("the work has not finished"),
}


def cuda_error(call: str, status: int, detail: str | None = None) -> CudaCallError:
    """Return the named error of a failed call.

    Args:
        call: What was called.
        status: What it returned; not `SUCCESS`.
        detail: The library's own words, for a status that is not known here.
    """
    for kind, table in (
        (GpuFatalError, FATAL),
        (CudaUnavailableError, SET_UP),
        (CudaNotReadyError, NOT_READY_YET),
        (GpuMemoryError, SHORTAGES),
        (CudaCallError, OTHERS),
    ):
        if (meaning := table.get(status)) is not None:
            return kind(call=call, status=status, meaning=meaning.text, hint=meaning.cure)
    return CudaCallError(call=call, status=status, meaning=detail or "an error not known here")


def as_fatal(call: str, error: BaseException) -> GpuFatalError | None:
    """Return what another library's exception says of the GPU: that it is lost, or None.

    Torch and CuPy each have an exception of their own for the same statuses, which carry them as
    `error_code` and `status`.
    """
    if isinstance(error, GpuFatalError):
        return error
    for name in ("error_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and status in FATAL:
            meaning = FATAL[status]
            return GpuFatalError(call=call, status=status, meaning=meaning.text, hint=meaning.cure)
    return None
