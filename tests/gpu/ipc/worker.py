"""One process with a GPU, told by a test what to do: `python -m tests.gpu.ipc.worker FD`.

CUDA IPC cannot be tested within one process: memory does not open where it was made.
"""

from __future__ import annotations

import gc
import hashlib
import os
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import cupy
import torch

from shared.daemon.devices import resolve_device
from shared.kv.cuda_driver import CudaDriver
from shared.kv.cuda_export import PoolExport, export_memory
from shared.kv.cuda_ipc import CudaIpcMapping, CudaIpcPool
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.cuda_preflight import inspect
from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.cuda_status import as_fatal
from shared.kv.layout import KVLayout
from shared.kv.machine_probe import MachineProbe
from shared.kv.nvml import is_nvlink
from shared.kv.proof import measure_bandwidth, read_digest, write_pattern
from tests.gpu.ipc.full_gpu import map_while_full

SPIN_CYCLES_A_MS = 1_900_000
"""An H200 runs at up to 1.98 GHz; a slower clock only makes a spin longer."""


class Worker:
    """A daemon's GPU work, one method a step; everything it returns can be sent."""

    def __init__(self) -> None:
        self.device = 0
        self.pool: CudaIpcPool | None = None
        self.mapping: CudaIpcMapping | None = None
        self.kept: list[Any] = []
        self.undo = ExitStack()

    # --- the process --------------------------------------------------------------------------

    def begin(self, device: int) -> str:
        """Start CUDA on a GPU, and return its UUID."""
        self.device = device
        torch.cuda.set_device(device)
        self.stream = torch.cuda.Stream()
        return CudaDriver.load().device_uuid(device)

    def hide_gpus(self, visible: str) -> None:
        """Must come before `begin`."""
        os.environ["CUDA_VISIBLE_DEVICES"] = visible

    def become(self, uid: int) -> None:
        """Change the user; must come before `begin`."""
        os.setresuid(uid, uid, uid)

    def pool_allocators(self) -> None:
        """Let CuPy and torch use allocators whose memory cannot be exported."""
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)
        self.kept += [cupy.zeros(1000), torch.zeros(1 << 20, device="cuda")]

    def free_bytes(self) -> list[int]:
        """Return what is free on every GPU, torch's cache given back."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[1])

    def resolve(self, name: str) -> str:
        return resolve_device(name).name

    def preflight(self, device: str, peer: str) -> list[tuple[str, bool]]:
        found = inspect(MachineProbe(), device=device, peer=peer, min_free_bytes=1)
        return [(finding.code, finding.is_fatal) for finding in found]

    def is_nvlink(self, one: str, two: str) -> bool | None:
        return is_nvlink(one, two)

    def fault(self) -> int | None:
        """Fail an assertion on the device, and return what torch's exception says of the GPU."""
        try:
            torch.zeros(4, device="cuda")[torch.full((1,), 1 << 40, device="cuda")].sum().item()
        except RuntimeError as error:
            fatal = as_fatal("a kernel", error)
            return None if fatal is None else fatal.status
        return 0

    # --- prefilld's side ----------------------------------------------------------------------

    def create(self, layout: KVLayout, **options: Any) -> PoolExport:  # noqa: ANN401
        self.pool = CudaIpcPool.create(layout, device=self.device, **options)
        export = self.pool.export()
        gc.collect()
        return export

    def create_local(self, layout: KVLayout) -> bool:
        """Make a pool that is filled with NaN, and return whether it is."""
        pool = LocalCudaPool.create(layout, device=self.device, fill=float("nan"))
        is_filled = bool(pool.kv.isnan().all())
        pool.close()
        return is_filled

    def create_at_offset(self, layout: KVLayout, offset: int) -> PoolExport:
        """Export a pool that lies inside of a larger allocation, with every byte 7."""
        runtime = CupyRuntime.load()
        base = runtime.allocate(offset + layout.pool_bytes)
        view = runtime.view(base + offset, layout.pool_bytes, self.device)
        view.tensor.fill_(7)
        torch.cuda.synchronize()
        handle, told = export_memory(runtime, base + offset, layout.pool_bytes)
        event = runtime.create_event()
        self.undo.callback(runtime.free, base)
        self.undo.callback(runtime.destroy_event, event)
        return PoolExport(handle, told, layout.pool_bytes, (runtime.export_event(event),))

    def free_at_offset(self) -> None:
        self.undo.close()

    def export_of_torch(self) -> PoolExport:
        """Try to export a tensor of torch's own allocator."""
        tensor = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
        handle, offset = export_memory(CupyRuntime.load(), tensor.data_ptr(), tensor.numel())
        return PoolExport(handle, offset, tensor.numel(), ())

    def range_of_pool(self) -> int:
        """Return how long the driver's allocation around the pool is."""
        assert self.pool is not None
        around = CupyRuntime.load().address_range(self.pool.kv.data_ptr())
        return -1 if around is None else around.num_bytes

    def fill_random(self, seed: int) -> None:
        """Write random bits over the whole pool, NaNs and denormals of every kind among them."""
        assert self.pool is not None
        words = self.pool.kv.view(torch.int16)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        words.random_(-(1 << 15), 1 << 15, generator=generator)
        torch.cuda.synchronize()

    def write(self, block: int, value: float, *, after_ms: float = 0.0) -> int:
        """Enqueue a write behind a kernel that spins, and return its event's slot."""
        assert self.pool is not None
        with torch.cuda.stream(self.stream):
            if after_ms:
                torch.cuda._sleep(int(after_ms * SPIN_CYCLES_A_MS))
            self.pool.kv[block].fill_(value)
            return self.pool.record(self.stream.cuda_stream)

    def write_pattern(self, pattern: bytes) -> bytes:
        assert self.pool is not None
        return write_pattern(self.pool, pattern)

    def record(self) -> int:
        assert self.pool is not None
        return self.pool.record(self.stream.cuda_stream)

    def close_pool(self) -> None:
        assert self.pool is not None
        self.pool.close()

    # --- decoded's side -----------------------------------------------------------------------

    def map(self, export: PoolExport, layout: KVLayout) -> float:
        """Map a pool, and return how many milliseconds it took."""
        began_s = time.perf_counter()
        self.mapping = CudaIpcMapping.open(export, layout, device=self.device)
        return (time.perf_counter() - began_s) * 1e3

    def refused_while_full(self, export: PoolExport, layout: KVLayout) -> tuple[str, str]:
        """Map and prove a pool as decoded does, with nothing free; return code and words."""
        return map_while_full(export, layout, device=self.device)

    def map_again(self, export: PoolExport, layout: KVLayout) -> None:
        """Open and close a second mapping of the same pool."""
        CudaIpcMapping.open(export, layout, device=self.device).close()

    def cycle(self, export: PoolExport, layout: KVLayout, times: int) -> None:
        for _ in range(times):
            self.map(export, layout)
            self.close_mapping()

    def open_with_flags(self, handle: bytes, flags: int) -> None:
        cupy.cuda.runtime.ipcOpenMemHandle(handle, flags)

    def read(self, block: int) -> float:
        """Read a block by a kernel on a stream of its own; NaN where it is not all one value."""
        assert self.mapping is not None
        with torch.cuda.stream(self.stream):
            low, high = self.mapping.kv[block].aminmax()
            values = torch.stack([low, high]).float().cpu()
        return float(values[0]) if values[0] == values[1] else float("nan")

    def read_when_done(self, slot: int, block: int, deadline_s: float = 20.0) -> float:
        """Poll an event, then read."""
        assert self.mapping is not None
        ends_s = time.monotonic() + deadline_s
        while not self.mapping.is_done(slot):
            if time.monotonic() > ends_s:
                raise TimeoutError("the event never completed")
        return self.read(block)

    def is_done(self, slot: int) -> bool:
        assert self.mapping is not None
        return self.mapping.is_done(slot)

    def ask_and_compute(self, slot: int) -> tuple[bool, float]:
        """Ask an event, then launch kernels of torch's and look for an error left behind."""
        is_done = self.is_done(slot)
        return is_done, float(torch.ones(1000, device="cuda").cumsum(0)[-1])

    def read_digest(self, num_bytes: int) -> bytes:
        assert self.mapping is not None
        return read_digest(self.mapping, num_bytes)

    def bandwidth(self) -> float:
        assert self.mapping is not None
        return measure_bandwidth(self.mapping)

    def keep_a_view(self) -> None:
        assert self.mapping is not None
        self.kept.append(self.mapping.kv[1, 0])

    def drop_views(self) -> None:
        self.kept.clear()

    def close_mapping(self) -> float:
        """Close as a daemon does, and return how many seconds that took."""
        assert self.mapping is not None
        began_s = time.perf_counter()
        torch.cuda.synchronize()
        self.mapping.close()
        return time.perf_counter() - began_s

    # --- both ---------------------------------------------------------------------------------

    def digest(self, side: str) -> str:
        """Return the hash of all bytes of the pool or of the mapping, read by a kernel."""
        source = self.pool if side == "pool" else self.mapping
        assert source is not None
        words = source.kv.reshape(-1).view(torch.int16) | 0
        return hashlib.sha256(words.cpu().numpy().tobytes()).hexdigest()


def main(fd: int) -> None:
    """Do what is asked until the test hangs up."""
    link, worker = Connection(fd), Worker()
    link.send(None)
    while True:
        try:
            name, arguments, options = link.recv()
        except EOFError:
            os._exit(0)
        try:
            link.send((True, getattr(worker, name)(*arguments, **options)))
        except Exception as error:
            link.send((False, (type(error).__name__, str(error))))


if __name__ == "__main__":
    main(int(sys.argv[1]))
