"""The few calls of the CUDA driver that CuPy's runtime has not, by ctypes; every status checked.

ctypes lets go of the interpreter lock, and the driver keeps no `last error` that a later launch
of another library would find and take for its own.
"""

from __future__ import annotations

import ctypes
import uuid
from typing import NamedTuple

from shared.kv.cuda_status import NOT_READY, SUCCESS, cuda_error
from shared.kv.errors import CudaCallError, CudaUnavailableError, GpuFatalError

LIBRARY = "libcuda.so.1"

_IS_LEGACY_IPC_CAPABLE = 10
"""`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`."""

_COMPUTE_MODE = 20
"""`CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`."""

_UUID_BYTES = 16
_MAX_NAME_BYTES = 256


class AddressRange(NamedTuple):
    """The driver's allocation around an address."""

    base: int
    num_bytes: int


class CudaDriver:
    """The driver's library.

    Args:
        library: libcuda, or what has its functions.

    Calls about memory and devices need a current context on the calling thread, which
    `CupyRuntime.use_device` makes.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        # By the argument's type: ctypes would cut a pointer that it takes for an int.
        self._query = library.cuEventQuery
        self._query.argtypes = [ctypes.c_void_p]

    @classmethod
    def load(cls) -> CudaDriver:
        """Load the driver and start it.

        Raises:
            CudaUnavailableError: It is not installed, or does not start.
        """
        try:
            driver = cls(ctypes.CDLL(LIBRARY))
        except OSError as error:
            raise CudaUnavailableError(
                call=f"loading {LIBRARY}",
                status=None,
                meaning="there is no NVIDIA driver here",
                hint='install it, or set both devices to "cpu"',
            ) from error
        driver.call("cuInit", 0)
        return driver

    def call(self, name: str, *arguments: object) -> None:
        """Call a function by name.

        Raises:
            CudaCallError: It did not return success.
        """
        status = getattr(self._library, name)(*arguments)
        if status != SUCCESS:
            raise cuda_error(name, status, self._describe(status))

    def is_event_done(self, event: int) -> bool:
        """Whether all work before an event's last record has finished; never blocks.

        Raises:
            GpuFatalError: The event can never complete.
        """
        status = self._query(event)
        if status == SUCCESS:
            return True
        if status == NOT_READY:
            return False
        known = cuda_error("cuEventQuery", status, self._describe(status))
        # Whatever else it is: a poller that waited on would wait for ever.
        raise GpuFatalError(
            call=known.call, status=status, meaning=known.meaning, hint=known.hint
        ) from known

    def address_range(self, address: int) -> AddressRange | None:
        """Return the allocation that an address lies in, or None where the driver does not tell."""
        base, num_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        try:
            self.call(
                "cuMemGetAddressRange_v2",
                ctypes.byref(base),
                ctypes.byref(num_bytes),
                ctypes.c_uint64(address),
            )
        except GpuFatalError:
            raise
        except CudaCallError:
            return None
        return AddressRange(base.value, num_bytes.value)

    def is_exportable(self, address: int) -> bool | None:
        """Whether memory can be opened by another process, or None where the driver is too old."""
        answer = ctypes.c_int()
        try:
            self.call(
                "cuPointerGetAttribute",
                ctypes.byref(answer),
                _IS_LEGACY_IPC_CAPABLE,
                ctypes.c_uint64(address),
            )
        except GpuFatalError:
            raise
        except CudaCallError:
            return None
        return bool(answer.value)

    def version(self) -> str:
        """Return the newest CUDA that the driver's library speaks, such as `13.0`."""
        number = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(number))
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def num_devices(self) -> int:
        """Return how many GPUs this process sees."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device_uuid(self, index: int) -> str:
        """Return a GPU's identity, `GPU-…` or, of a part of one, `MIG-…`.

        An index names another GPU in every process; this does not.
        """
        device = self._device(index)
        raw = ctypes.create_string_buffer(_UUID_BYTES)
        self.call("cuDeviceGetUuid_v2", raw, device)
        name = ctypes.create_string_buffer(_MAX_NAME_BYTES)
        self.call("cuDeviceGetName", name, _MAX_NAME_BYTES, device)
        # A part of a GPU has its profile in its name: `… MIG 1g.5gb`.
        kind = "MIG" if b" MIG " in name.value else "GPU"
        return f"{kind}-{uuid.UUID(bytes=raw.raw)}"

    def compute_mode(self, index: int) -> int:
        """Return who may use a GPU: 0 everybody, 2 nobody, 3 one process."""
        mode = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(mode), _COMPUTE_MODE, self._device(index))
        return mode.value

    def can_access_peer(self, index: int, peer: int) -> bool:
        """Whether a GPU can read another one's memory, as the driver believes."""
        can = ctypes.c_int()
        self.call(
            "cuDeviceCanAccessPeer", ctypes.byref(can), self._device(index), self._device(peer)
        )
        return bool(can.value)

    def _device(self, index: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        return device

    def _describe(self, status: int) -> str | None:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorString(status, ctypes.byref(text)) != SUCCESS:
            return None
        return None if text.value is None else text.value.decode(errors="replace")
