"""Tests of shared/kv/errors.py."""

from __future__ import annotations

import inspect

from shared.errors import ExitCode, KvpairError
from shared.kv import errors

CLASSES = {
    name: kind
    for name, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, errors.KvError)
}


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    """A reader finds every error there, under its parent."""
    drawn = [
        (name, line)
        for line in (errors.__doc__ or "").splitlines()
        for name in CLASSES.keys() & set(line.split()[:2])
    ]
    assert sorted(name for name, _ in drawn) == sorted(CLASSES)
    for name, line in drawn:
        is_below_misuse = errors.MisuseError in CLASSES[name].__mro__[1:]
        assert line.startswith("        ") is is_below_misuse


def test_only_what_a_user_can_mend_is_told_as_a_users_error() -> None:
    """Everything else is the peer's fault or a bug of ours, and gets its traceback."""
    told = {name for name, kind in CLASSES.items() if issubclass(kind, KvpairError)}
    assert told == {
        "CudaNotReadyError",
        "CudaUnavailableError",
        "GpuMemoryError",
        "LayoutError",
        "PoolAllocationError",
        "PoolShortageError",
    }


def test_what_may_pass_by_itself_is_told_by_a_code_that_is_tried_again() -> None:
    """A service manager leaves a daemon down that ended with the other one."""
    for passing, lasting in (
        (errors.PoolShortageError, errors.PoolAllocationError),
        (errors.CudaNotReadyError, errors.CudaUnavailableError),
    ):
        assert issubclass(passing, lasting)
        assert (passing.exit_code, lasting.exit_code) == (ExitCode.BUSY, ExitCode.CONFIG)


def test_an_allocation_error_says_what_to_do() -> None:
    """The hint is part of the one line that the user reads."""
    error = errors.PoolAllocationError(num_bytes=9, reason="no room", hint="ask for fewer blocks")
    assert str(error) == "cannot allocate a pool of 9 bytes: no room; ask for fewer blocks"
