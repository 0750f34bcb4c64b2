"""The one border over CUDA for the pool: memory, handles and events, every status checked.

`CudaRuntime` says what the pool needs; `CupyRuntime` does it.  Errors of CuPy and of the driver
become those of `shared.kv.errors` here and nowhere else.
"""

from __future__ import annotations

import importlib
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_status import cuda_error
from shared.kv.errors import CudaCallError, CudaUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shared.kv.cuda_driver import AddressRange

HANDLE_BYTES = 64
"""Length of CUDA's handles, of memory and of events."""

_EVENT_FLAGS = 2 | 4
"""`cudaEventDisableTiming | cudaEventInterprocess`: the second demands the first."""

_LAZY_PEER_ACCESS = 1
"""`cudaIpcMemLazyEnablePeerAccess`, the only flag that opening memory takes."""


class Memory(NamedTuple):
    """A GPU's memory, in bytes."""

    free: int
    total: int


class View(NamedTuple):
    """A tensor over memory that torch does not own."""

    tensor: Tensor
    """[num_bytes] uint8."""
    watch: weakref.ref[Any]
    """Dead once neither that tensor nor any view of it lives."""


class CudaRuntime(Protocol):
    """What the pool needs of CUDA.  All of it raises `CudaCallError` or one of its children.

    Every call belongs on the engine thread, whose current device is the pool's.  Exporting and
    opening hold the interpreter lock, for up to 10 ms across GPUs: at hand-shake only.
    """

    def use_device(self, index: int) -> None:
        """Make a GPU this thread's current one."""

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new memory that no allocator pools."""

    def free(self, address: int) -> None:
        """Give `allocate`'s memory back."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin host memory, so that the GPU copies to it and from it without the host's help."""

    def unpin(self, address: int) -> None:
        """Undo one `pin`."""

    def export_memory(self, address: int) -> bytes:
        """Return the handle of the whole allocation around an address."""

    def open_memory(self, handle: bytes) -> int:
        """Map another process's allocation, and return its base here."""

    def close_memory(self, address: int) -> None:
        """Undo one `open_memory`."""

    def address_range(self, address: int) -> AddressRange | None:
        """Return the allocation that an address lies in, or None where nobody tells."""

    def is_exportable(self, address: int) -> bool | None:
        """Whether memory can be opened by another process, or None where nobody tells."""

    def uuid(self, index: int) -> str:
        """Return a GPU's identity, which every process knows it by."""

    def memory(self) -> Memory:
        """Return how much memory the current GPU has."""

    def create_event(self) -> int:
        """Return a new event that another process can open."""

    def export_event(self, event: int) -> bytes:
        """Return an event's handle."""

    def open_event(self, handle: bytes) -> int:
        """Open another process's event, to be asked and never to be waited for on a stream."""

    def destroy_event(self, event: int) -> None:
        """Undo one `create_event` or `open_event`."""

    def record_event(self, event: int, stream: int) -> None:
        """Let an event complete when all that is on a stream now has finished."""

    def is_event_done(self, event: int) -> bool:
        """Whether an event has completed; never blocks.

        Raises:
            GpuFatalError: It never will.
        """

    def synchronize(self) -> None:
        """Wait until the current GPU has finished all work of this process."""

    def view(self, address: int, num_bytes: int, device: int) -> View:
        """Return memory as a tensor on a GPU, without a copy."""


class CupyRuntime:
    """CUDA as CuPy's runtime bindings and the driver give it.

    Args:
        runtime: `cupy.cuda.runtime`.
        driver: The driver.
    """

    def __init__(self, runtime: Any, driver: CudaDriver) -> None:  # noqa: ANN401  untyped library
        self._runtime, self._driver = runtime, driver
        self._error: type[Exception] = runtime.CUDARuntimeError

    @classmethod
    def load(cls) -> CupyRuntime:
        """Import CuPy and load the driver.

        Raises:
            CudaUnavailableError: There is no driver, or no CuPy that imports.
        """
        driver = CudaDriver.load()
        try:
            runtime = importlib.import_module("cupy.cuda.runtime")
        except ImportError as error:
            raise CudaUnavailableError(
                call="import cupy",
                status=None,
                meaning=str(error),
                hint=cupy_hint(torch.version.cuda),
            ) from error
        return cls(runtime, driver)

    def use_device(self, index: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.setDevice, index)

    def allocate(self, num_bytes: int) -> int:
        """See `CudaRuntime`; whatever allocator CuPy has been given is passed by."""
        return int(self._call(self._runtime.malloc, num_bytes))

    def free(self, address: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.free, address)

    def pin(self, address: int, num_bytes: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.hostRegister, address, num_bytes, 0)

    def unpin(self, address: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.hostUnregister, address)

    def export_memory(self, address: int) -> bytes:
        """See `CudaRuntime`."""
        return bytes(self._call(self._runtime.ipcGetMemHandle, address))

    def open_memory(self, handle: bytes) -> int:
        """See `CudaRuntime`."""
        return int(self._call(self._runtime.ipcOpenMemHandle, handle, _LAZY_PEER_ACCESS))

    def close_memory(self, address: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.ipcCloseMemHandle, address)

    def address_range(self, address: int) -> AddressRange | None:
        """See `CudaRuntime`."""
        return self._driver.address_range(address)

    def is_exportable(self, address: int) -> bool | None:
        """See `CudaRuntime`."""
        return self._driver.is_exportable(address)

    def uuid(self, index: int) -> str:
        """See `CudaRuntime`."""
        return self._driver.device_uuid(index)

    def memory(self) -> Memory:
        """See `CudaRuntime`."""
        free, total = self._call(self._runtime.memGetInfo)
        return Memory(int(free), int(total))

    def create_event(self) -> int:
        """See `CudaRuntime`."""
        return int(self._call(self._runtime.eventCreateWithFlags, _EVENT_FLAGS))

    def export_event(self, event: int) -> bytes:
        """See `CudaRuntime`."""
        return bytes(self._call(self._runtime.ipcGetEventHandle, event))

    def open_event(self, handle: bytes) -> int:
        """See `CudaRuntime`."""
        return int(self._call(self._runtime.ipcOpenEventHandle, handle))

    def destroy_event(self, event: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.eventDestroy, event)

    def record_event(self, event: int, stream: int) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.eventRecord, event, stream)

    def is_event_done(self, event: int) -> bool:
        """See `CudaRuntime`; by the driver, whose answer `not ready` leaves nothing behind."""
        return self._driver.is_event_done(event)

    def synchronize(self) -> None:
        """See `CudaRuntime`."""
        self._call(self._runtime.deviceSynchronize)

    def view(self, address: int, num_bytes: int, device: int) -> View:
        """See `CudaRuntime`."""
        span = _Span(address, num_bytes)
        # Without the device torch guesses, and has been seen to copy to the CPU in silence.
        tensor = torch.as_tensor(span, device=torch.device("cuda", device))
        if tensor.data_ptr() != address or tensor.device != torch.device("cuda", device):
            raise CudaCallError(
                call="torch.as_tensor",
                status=None,
                meaning=f"it copied the memory at {address:#x} to {tensor.device}",
            )
        return View(tensor, weakref.ref(span))

    def _call(self, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
        try:
            return function(*arguments)
        except self._error as error:
            self._raise(function, error)

    def _raise(self, function: Callable[..., Any], error: Exception) -> NoReturn:
        name = getattr(function, "__name__", "a call")
        status = getattr(error, "status", None)
        if not isinstance(status, int):
            raise CudaCallError(call=name, status=None, meaning=str(error)) from error
        raise cuda_error(name, status, str(error)) from error


def cupy_hint(torch_cuda: str | None) -> str:
    """Return which of this package's extras brings the CuPy that fits torch.

    Args:
        torch_cuda: The CUDA that torch was built for: `torch.version.cuda`.
    """
    if torch_cuda is None:
        return "this torch is for CPUs: install one that is built for CUDA, and CuPy with it"
    extra = "cuda" if int(torch_cuda.partition(".")[0]) <= 12 else "cuda13"
    return f"pip install 'kvpair[{extra}]'"


class _Span:
    """Memory as torch takes it in.  Torch's storage holds it, so it lives as long as a view does.

    As bytes: the interface's own type codes cannot tell bfloat16 from float16.
    """

    __slots__ = ("__cuda_array_interface__", "__weakref__")

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
