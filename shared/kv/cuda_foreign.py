"""What other libraries' exceptions say of the GPU, under our names: torch's, Triton's, CuPy's.

Each has its own exceptions for the same few faults, and of memory that ran out torch alone has
three.  They are told apart here and nowhere else.
"""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_status import OUT_OF_MEMORY, as_fatal, cuda_error
from shared.kv.errors import CudaCallError, GpuMemoryError
from shared.kv.nvml import describe_holders, memory_holders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORTAGE_WORDS = ("out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED")
"""What Triton, cuBLAS and cuDNN say, whose exceptions carry no status."""


class GpuMemory(NamedTuple):
    """The current GPU's, in bytes."""

    free: int
    total: int
    ours: int
    """What torch has taken for this process."""


def look() -> GpuMemory:
    """Ask the driver and torch about the current GPU."""
    free, total = torch.cuda.mem_get_info()
    return GpuMemory(free=free, total=total, ours=torch.cuda.memory_reserved())


def holders() -> str:
    """Say in words who holds the current GPU's memory, as far as anybody tells."""
    uuid = CudaDriver.load().device_uuid(torch.cuda.current_device())
    return describe_holders(memory_holders(uuid))


def is_shortage(error: BaseException) -> bool:
    """Whether an exception says that a GPU's memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | GpuMemoryError):
        return True
    if OUT_OF_MEMORY in (getattr(error, "error_code", None), getattr(error, "status", None)):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in SHORTAGE_WORDS)


def named(
    call: str,
    error: BaseException,
    *,
    look: Callable[[], GpuMemory] = look,
    holders: Callable[[], str] = holders,
) -> CudaCallError | None:
    """Return our name of an exception: a lost GPU, full memory, or a failed call.

    Args:
        call: What was being done.
        error: The exception.  A name of ours is kept; full memory gets what it lacks.
        look: Asks about the current GPU's memory.
        holders: Says who holds it.

    Returns:
        None for what says nothing of a GPU.
    """
    if (fatal := as_fatal(call, error)) is not None:
        return fatal
    if isinstance(error, CudaCallError) and (error.hint or not is_shortage(error)):
        return error
    if is_shortage(error):
        call = error.call if isinstance(error, CudaCallError) else call
        return _shortage(call, look, holders)
    status = getattr(error, "error_code", None)
    if isinstance(error, torch.AcceleratorError) and isinstance(status, int):
        return cuda_error(call, status, str(error).partition("\n")[0])
    return None


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Give what fails inside the block our name, where it says something of a GPU.

    Args:
        call: What is being done.

    Raises:
        CudaCallError: A call to CUDA failed, whoever made it.
    """
    try:
        yield
    except (RuntimeError, CudaCallError) as error:  # torch's, Triton's and CuPy's are the former
        name = named(call, error)
        if name is None or name is error:
            raise
        raise name from error


def _shortage(
    call: str, look: Callable[[], GpuMemory], holders: Callable[[], str]
) -> GpuMemoryError:
    meaning, hint = "the GPU's memory is full", None
    # Without a GPU torch raises an AssertionError, and one that is full may not even answer.
    with suppress(RuntimeError, AssertionError, CudaCallError):
        memory = look()
        meaning += f": {memory.free} of its {memory.total} bytes are free"
        hint = holders()
    return GpuMemoryError(call=call, status=OUT_OF_MEMORY, meaning=meaning, hint=hint)
