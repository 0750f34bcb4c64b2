"""The machine that this process runs on, as the preflight looks at it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.kv.c_compiler import compiler_fault
from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.nvml import memory_holders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shared.kv.cuda_runtime import Memory
    from shared.kv.nvml import Holder


class MachineProbe:
    """See `shared.kv.cuda_preflight.Probe`."""

    @property
    def environ(self) -> Mapping[str, str]:
        """See `Probe`."""
        return os.environ

    @property
    def torch_cuda(self) -> str | None:
        """See `Probe`."""
        return torch.version.cuda

    def read(self, path: str) -> str | None:
        """See `Probe`."""
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def node_fault(self, path: str) -> str | None:
        """See `Probe`."""
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            return error.strerror
        return None

    def gpus(self) -> CudaDriver:
        """See `Probe`."""
        return CudaDriver.load()

    def cupy_fault(self) -> str | None:
        """See `Probe`."""
        try:
            importlib.import_module("cupy.cuda.runtime")
        except ImportError as error:
            return str(error)
        return None

    def compiler_fault(self) -> str | None:
        """See `Probe`."""
        return compiler_fault(os.environ)

    def memory(self, index: int) -> Memory:
        """See `Probe`; makes the GPU this thread's current one."""
        runtime = CupyRuntime.load()
        runtime.use_device(index)
        return runtime.memory()

    def holders(self, uuid: str) -> list[Holder] | None:
        """See `Probe`."""
        return memory_holders(uuid)
