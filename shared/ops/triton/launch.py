"""Launches: cheap for the host, and begun before the launch ahead of them has ended.

**Cheap.**  Triton looks at every argument of every launch, which takes some 15 µs; a prompt of 512
tokens is 160 launches and 11 ms long.  So a kernel that was compiled for arguments of the same
kinds is launched directly.

**Begun early** (Hopper and later).  A kernel whose `IS_DEPENDENT` is set says at once that the next
launch may come, so that the next one's thread blocks fill the multiprocessors as its own run out.
It then may read only what no launch of the same step writes (weights, block tables, keys and values
of earlier tokens) until `gdc_wait` has returned, which is when the launch ahead is complete, and by
the same rule all those before it.  What it writes, it writes behind the wait.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Hashable

FIRST_CAPABILITY = (9, 0)
"""Of a GPU, from which on launches may begin early."""

ALIGNMENT_BYTES = 16
"""Triton compiles other code for addresses and numbers that are multiples of it."""

NUM_STAGES = 3

Argument = Tensor | int | float
Grid = tuple[int, int, int]


class Launch:
    """Launches one kernel.

    Args:
        kernel: What `triton.jit` returned.  Parameters that are compiled in come last, in the order
            in which calls name them.
        begins_early: Whether the last of these is `IS_DEPENDENT`.
    """

    def __init__(
        self,
        kernel: Any,  # noqa: ANN401 - triton has no types
        *,
        begins_early: bool = True,
    ) -> None:
        self._kernel, self._begins_early = kernel, begins_early
        self._compiled: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: Grid,
        *arguments: Argument,
        num_warps: int,
        num_stages: int = NUM_STAGES,
        **constants: Hashable,
    ) -> None:
        """Enqueue one launch on the current stream of the first argument's device.

        Args:
            grid: Thread blocks.
            arguments: The parameters that are not compiled in; the first one is a tensor.
            num_warps: Of a thread block.
            num_stages: Loads in flight in a loop.
            constants: The parameters that are compiled in, without `IS_DEPENDENT`.
        """
        first = arguments[0]
        assert isinstance(first, Tensor)
        if not first.is_cuda:  # the interpreter
            self._check_order(len(arguments), constants)
            flags = {"IS_DEPENDENT": False} if self._begins_early else {}
            self._kernel[grid](*arguments, **constants, **flags, num_warps=num_warps)
            return
        key = (
            first.device.index,
            num_warps,
            num_stages,
            *constants.values(),
            *map(_kind, arguments),
        )
        compiled = self._compiled.get(key)
        if compiled is not None:
            dependence = (_is_capable(first.device),) if self._begins_early else ()
            compiled[grid](*arguments, *constants.values(), *dependence)
            return
        self._check_order(len(arguments), constants)
        options: dict[str, bool] = {}
        if self._begins_early:
            is_dependent = _is_capable(first.device)
            options = {"IS_DEPENDENT": is_dependent, "launch_pdl": is_dependent}
        self._compiled[key] = self._kernel[grid](
            *arguments, **constants, **options, num_warps=num_warps, num_stages=num_stages
        )

    def _check_order(self, num_arguments: int, constants: dict[str, Hashable]) -> None:
        """Raise TypeError unless constants are named in the order of the kernel's parameters.

        By name Triton would take any order, but a compiled kernel is called by position.
        """
        expected = self._kernel.arg_names[num_arguments:]
        if [*constants, *(["IS_DEPENDENT"] if self._begins_early else [])] != expected:
            raise TypeError(f"constants {[*constants]} are not the kernel's {expected}")


def ceil_div(number: int, divisor: int) -> int:
    """Return how many times `divisor` covers `number`."""
    return -(-number // divisor)


def padded(number: int) -> int:
    """Return the smallest power of two that is at least `number`: kernels' ranges are such."""
    return 1 << (number - 1).bit_length()


def _kind(argument: Argument) -> Hashable:
    """Return what of an argument decides for which code it is compiled."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT_BYTES == 0
    if isinstance(argument, int):
        return argument == 1, argument % ALIGNMENT_BYTES == 0, argument.bit_length() > 31
    return None


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
