"""decoded's hand-shake on a GPU that has no memory left."""

from __future__ import annotations

import gc
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from decoded.mapping import PeerPool, map_pool
from protocol import messages as wire
from shared.daemon.devices import Device
from shared.kv.control_page import ControlPage
from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.errors import GpuMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shared.kv.cuda_export import PoolExport
    from shared.kv.layout import KVLayout

SMALLEST_BYTES = 64 << 10
"""Much less than what torch asks the driver for at a time, 2 MiB."""


def map_while_full(export: PoolExport, layout: KVLayout, *, device: int) -> tuple[str, str]:
    """Map and prove a pool with nothing free; return the code and the words of the refusal.

    Args:
        export: The pool, of another process.
        layout: Its layout.
        device: Index of the GPU that reads it, the current one.
    """
    runtime = CupyRuntime.load()
    uuid = runtime.uuid(device)
    page = ControlPage.create(4)
    message = wire.Map(
        pool_bytes=export.num_bytes,
        offset=export.offset,
        num_blocks=layout.num_blocks,
        control_slots=page.num_slots,
        proof_bytes=4096,
        pool_handle=export.handle,
        event_handles=list(export.event_handles),
    )
    with _nothing_free(runtime):
        mapped = map_pool(
            message,
            [page.export()],
            layout=layout,
            device=Device(name=uuid, index=device),
            peer_device=uuid,
            peer_driver="",
            min_bandwidth_gb_s=0.0,
        )
    page.close()
    if isinstance(mapped, PeerPool):
        mapped.close()
        return "", "it was mapped"
    return mapped.code, mapped.ours


@contextmanager
def _nothing_free(runtime: CupyRuntime) -> Iterator[None]:
    """Take all of the current GPU's memory, torch's cache included."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    num_bytes = runtime.memory().free
    with ExitStack() as undo:
        while num_bytes >= SMALLEST_BYTES:
            try:
                undo.callback(runtime.free, runtime.allocate(num_bytes))
            except GpuMemoryError:
                num_bytes //= 2
        yield
