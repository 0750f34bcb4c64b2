"""What computes answers, and the pool that they are computed in: on the CPU or on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from decoded.overlapped_turns import OverlappedTurns
from decoded.turns import EagerTurns
from shared.engine.block_puller import CudaPuller
from shared.engine.decoding import EagerDecoder
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.runner import ModelRunner
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
    turns: Turns


def make_decode_engine(host: ModelHost, device: Device, config: Config) -> DecodeEngine:
    """Allocate the pool and build what computes in it.  On the engine thread.

    Raises:
        PoolAllocationError: There is no room for the pool.
        CudaCallError: CUDA failed, or is not there.
    """
    layout = host.layout
    if device.index is None:
        pool = LocalPool(layout)
        decoder = EagerDecoder(ModelRunner(host.model, pool.kv, layout))
        return DecodeEngine(pool=pool, turns=EagerTurns(decoder, pool.kv))
    cuda_pool = LocalCudaPool.create(layout, device=device.index)
    graphs = GraphDecoder(
        host.model,
        PoolPair.of(cuda_pool.kv),
        layout,
        max_batch=config.decoded.max_batch,
        max_context_len=min(host.spec.max_context_tokens, layout.num_blocks * layout.block_size),
    )
    turns = OverlappedTurns(
        graphs, CudaPuller(cuda_pool.kv), event_timeout_s=config.link.ping_timeout_s
    )
    return DecodeEngine(pool=cuda_pool, turns=turns)
