"""A machine that is only described, for the preflight; by default a healthy one with two GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.kv.cuda_runtime import Memory
from shared.kv.cuda_status import cuda_error
from shared.kv.nvml import Holder

ONE, TWO = "GPU-one", "GPU-two"
LINUX = {"/proc/version": "Linux version 6.1", "/proc/driver/nvidia/version": "NVRM version: 580"}


@dataclass
class Machine:
    """A Probe and its Gpus in one."""

    uuids: tuple[str, ...] = (ONE, TWO)
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=lambda: LINUX)
    node_faults: Mapping[str, str] = field(default_factory=dict)
    driver_status: int = 0
    cupy: str | None = None
    compiler: str | None = None
    torch_cuda: str | None = "13.0"
    modes: Mapping[int, int] = field(default_factory=dict)
    peers: bool = True
    free: int = 100
    held: list[Holder] | None = None

    def read(self, path: str) -> str | None:
        return self.files.get(path)

    def node_fault(self, path: str) -> str | None:
        return self.node_faults.get(path)

    def gpus(self) -> Machine:
        if self.driver_status:
            raise cuda_error("cuInit", self.driver_status)
        return self

    def cupy_fault(self) -> str | None:
        return self.cupy

    def compiler_fault(self) -> str | None:
        return self.compiler

    def memory(self, index: int) -> Memory:
        assert index == 0
        return Memory(free=self.free, total=200)

    def holders(self, uuid: str) -> list[Holder] | None:
        assert uuid == ONE
        return self.held

    def version(self) -> str:
        return "13.0"

    def num_devices(self) -> int:
        return len(self.uuids)

    def device_uuid(self, index: int) -> str:
        return self.uuids[index]

    def compute_mode(self, index: int) -> int:
        return self.modes.get(index, 0)

    def can_access_peer(self, index: int, peer: int) -> bool:
        assert index != peer
        return self.peers
