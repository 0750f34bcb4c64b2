"""Other libraries' exceptions under our names, without their libraries."""

from __future__ import annotations

import pytest
import torch

from shared.kv.cuda_foreign import GpuMemory, is_shortage, named, naming
from shared.kv.cuda_status import cuda_error
from shared.kv.errors import CudaCallError, CudaUnavailableError, GpuFatalError, GpuMemoryError

MEMORY = GpuMemory(free=3, total=100, ours=7)


class Accelerator(torch.AcceleratorError):
    """Torch's exception of a failed call, with the status that it carries on a GPU."""

    def __init__(self, status: int) -> None:
        super().__init__("CUDA error: words\nCUDA kernel errors might be reported elsewhere")
        self.error_code = status


class Cupy(RuntimeError):
    """CuPy's."""

    def __init__(self, status: int) -> None:
        super().__init__("cudaErrorSomething: words")
        self.status = status


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
    Accelerator(2),
    Cupy(2),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    cuda_error("malloc", 2),
]


def told(error: BaseException) -> CudaCallError | None:
    return named("a step", error, look=lambda: MEMORY, holders=lambda: "it is held by X 9 (5 MiB)")


@pytest.mark.parametrize("error", SHORTAGES)
def test_full_memory_has_one_name_that_says_who_has_it(error: Exception) -> None:
    """Torch alone has three exceptions for it, none of which names anybody."""
    name = told(error)
    assert type(name) is GpuMemoryError
    assert str(name).endswith(
        "failed with CUDA error 2: the GPU's memory is full: 3 of its 100 bytes are free; "
        "it is held by X 9 (5 MiB)"
    )
    assert told(name) is name, "what it lacks is told once"


def test_where_nobody_tells_the_name_stands_alone() -> None:
    """There is no GPU here, and one that is full may not answer either."""
    name = named("a step", SHORTAGES[0])
    assert str(name) == "a step failed with CUDA error 2: the GPU's memory is full"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Accelerator(700), GpuFatalError),
        (Cupy(719), GpuFatalError),
        (Accelerator(100), CudaUnavailableError),
        (Accelerator(1), CudaCallError),
    ],
)
def test_other_statuses_keep_what_they_mean(error: Exception, kind: type[CudaCallError]) -> None:
    assert type(told(error)) is kind


@pytest.mark.parametrize("error", [RuntimeError("a shape is wrong"), ValueError("out of memory")])
def test_what_says_nothing_of_a_gpu_keeps_its_own_name(error: Exception) -> None:
    """A bug of ours must not be told as a matter of the machine."""
    assert not is_shortage(error)
    assert told(error) is None
    with pytest.raises(type(error), match=str(error)) as raised, naming("a step"):
        raise error
    assert raised.value is error


def test_the_foreign_exception_is_the_cause() -> None:
    """Its traceback says which call it was."""
    with pytest.raises(GpuMemoryError, match="a step failed") as raised, naming("a step"):
        raise SHORTAGES[0]
    assert raised.value.__cause__ is SHORTAGES[0]
