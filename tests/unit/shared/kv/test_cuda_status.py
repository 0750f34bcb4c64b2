"""Tests of shared/kv/cuda_status.py."""

from __future__ import annotations

import pytest

from shared.errors import EnvironmentUnsupportedError, ExitCode
from shared.kv.cuda_status import (
    FATAL,
    NOT_READY_YET,
    OTHERS,
    SET_UP,
    SHORTAGES,
    as_fatal,
    cuda_error,
)
from shared.kv.errors import (
    CudaCallError,
    CudaNotReadyError,
    CudaUnavailableError,
    GpuFatalError,
)


@pytest.mark.parametrize("status", [214, 700, 702, 709, 710, *range(714, 720), 810, 999])
def test_a_status_that_nothing_survives_is_fatal(status: int) -> None:
    """A process that lived on would answer errors for hours."""
    error = cuda_error("aCall", status)
    assert type(error) is GpuFatalError
    assert (error.call, error.status) == ("aCall", status)
    assert not isinstance(error, EnvironmentUnsupportedError)


@pytest.mark.parametrize(
    ("status", "cure"),
    [
        (35, "newer driver"),
        (100, "CUDA_VISIBLE_DEVICES"),
        (205, "both GPUs' device nodes"),
        (217, "use one GPU for both daemons, or another pair"),
        (304, "/proc/driver/nvidia"),
        (803, "restart the machine"),
    ],
)
def test_a_matter_of_set_up_says_what_to_do(status: int, cure: str) -> None:
    error = cuda_error("aCall", status)
    assert isinstance(error, CudaUnavailableError)
    assert error.exit_code is ExitCode.CONFIG
    assert cure in str(error)
    assert str(error).startswith(f"aCall failed with CUDA error {status}: ")


@pytest.mark.parametrize(
    ("status", "cure"),
    [(46, "nvidia-smi -c DEFAULT"), (802, "fabric manager"), (807, "start it"), (808, "")],
)
def test_what_may_pass_by_itself_is_tried_again(status: int, cure: str) -> None:
    """A daemon that starts before the fabric manager at boot must not stay down."""
    error = cuda_error("aCall", status)
    assert isinstance(error, CudaNotReadyError)
    assert error.exit_code is ExitCode.BUSY
    assert cure in str(error)


def test_an_unknown_status_is_told_in_the_librarys_words() -> None:
    assert str(cuda_error("aCall", 4711, "no idea")) == (
        "aCall failed with CUDA error 4711: no idea"
    )
    assert "not known here" in str(cuda_error("aCall", 4711))
    assert type(cuda_error("aCall", 4711)) is CudaCallError


def test_no_status_is_in_two_tables() -> None:
    """Which one counts would hang on their order."""
    tables = FATAL, SET_UP, NOT_READY_YET, SHORTAGES, OTHERS
    assert len(set().union(*tables)) == sum(map(len, tables))


def test_a_foreign_exception_is_fatal_by_its_status() -> None:
    """Torch's kernels and ours fail with exceptions of their own for one fault."""

    class TorchError(RuntimeError):
        error_code = 700

    class CupyError(RuntimeError):
        status = 719

    class Harmless(RuntimeError):
        status = 2

    for foreign, status in ((TorchError("x"), 700), (CupyError("x"), 719)):
        fatal = as_fatal("step", foreign)
        assert fatal is not None
        assert fatal.status == status
        assert fatal.call == "step"
    assert as_fatal("step", Harmless("x")) is None
    assert as_fatal("step", ValueError("x")) is None
    known = cuda_error("aCall", 700)
    assert as_fatal("step", known) is known
