"""What computes answers, and the pool that they are computed in: on the CPU or on a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoded.overlapped_turns import ArenaPath, OverlappedTurns
from decoded.turns import EagerTurns
from shared.engine.block_puller import CudaPuller
from shared.engine.decoding import EagerDecoder
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.run_copies import RunCopies
from shared.engine.runner import ModelRunner
from shared.kv.arena import GIB, local_arena, pinned_arena
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.pool import LocalPool
from shared.ops.pool_pair import PoolPair

if TYPE_CHECKING:
    from decoded.turns import Turns
    from shared.config import Config
    from shared.daemon.devices import Device
    from shared.daemon.model_host import ModelHost
    from shared.kv.pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeEngine:
    """One engine over one pool."""

    pool: KVPool
    arena: KVPool | None
    """Host memory for sequences that make room; None where there is none."""
    turns: Turns
    pool_s: float
    """How long it took to get the pool's memory, waiting for what others held included."""
    arena_fault: str = "less than a block of memory is free for it"
    """Why there is none, where some was asked for."""


def make_decode_engine(host: ModelHost, device: Device, config: Config) -> DecodeEngine:
    """Allocate the pool and build what computes in it.  On the engine thread.

    Raises:
        PoolAllocationError: There is no room for the pool.
        CudaCallError: CUDA failed, or is not there.
    """
    layout = host.layout
    swap_bytes = int(config.decoded.swap_gib * GIB)
    began_s = time.monotonic()
    if device.index is None:
        pool = LocalPool(layout)
        pool_s = time.monotonic() - began_s
        local = local_arena(layout, max_bytes=swap_bytes)
        decoder = EagerDecoder(ModelRunner(host.model, pool.kv, layout))
        eager = EagerTurns(decoder, pool.kv, None if local is None else local.kv)
        return DecodeEngine(pool=pool, arena=local, turns=eager, pool_s=pool_s)
    cuda_pool = LocalCudaPool.create(layout, device=device.index)
    pool_s = time.monotonic() - began_s
    graphs = GraphDecoder(
        host.model,
        PoolPair.of(cuda_pool.kv),
        layout,
        max_batch=config.decoded.max_batch,
        # Not what the own pool holds: with direct access most of a context is in the peer's.
        max_context_len=host.spec.max_context_tokens,
    )
    found = pinned_arena(layout, max_bytes=swap_bytes)
    pinned = None if isinstance(found, str) else found
    turns = OverlappedTurns(
        graphs,
        CudaPuller(cuda_pool.kv),
        event_timeout_s=config.link.ping_timeout_s,
        arena_path=None if pinned is None else _path_between(cuda_pool, pinned),
    )
    if isinstance(found, str):
        return DecodeEngine(
            pool=cuda_pool, arena=None, turns=turns, pool_s=pool_s, arena_fault=found
        )
    return DecodeEngine(pool=cuda_pool, arena=found, turns=turns, pool_s=pool_s)


def _path_between(pool: KVPool, arena: KVPool) -> ArenaPath:
    device = pool.kv.device
    return ArenaPath(
        pool=pool.kv,
        arena=arena.kv,
        out=RunCopies(arena.kv, device),
        back=RunCopies(pool.kv, device),
    )
