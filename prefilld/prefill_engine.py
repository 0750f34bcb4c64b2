"""What computes prompts, and the pool that they are computed into: on the CPU or on a GPU."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.engine.batch import SequenceStep
from shared.engine.device_stream import DeviceStream
from shared.engine.prefill_graphs import PrefillGraphs
from shared.engine.prefilling import EagerPrefiller
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.errors import EnvironmentUnsupportedError
from shared.kv.cuda_ipc import CudaIpcPool
from shared.kv.layout import RESERVED_BLOCK
from shared.kv.memfd import MemfdPool
from shared.ops.attention_choice import AttentionUnavailableError
from shared.ops.sampler import warm_up_sampler
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from shared.daemon.devices import Device
    from shared.daemon.model_host import ModelHost
    from shared.engine.prefilling import Prefiller
    from shared.kv.layout import KVLayout
    from shared.ops.attention_choice import AttentionChoice, AttentionName


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PrefillEngine:
    """One engine over one pool."""

    pool: MemfdPool | CudaIpcPool
    prefiller: Prefiller
    attention: AttentionChoice
    """Who computes attention of long prompts."""
    pool_s: float
    """How long it took to get the pool's memory, waiting for what others held included."""


def make_prefill_engine(
    host: ModelHost, device: Device, *, token_budget: int, attention: AttentionName
) -> PrefillEngine:
    """Allocate the pool and build what computes into it.  On the engine thread.

    Args:
        host: The model.
        device: Where it is.
        token_budget: Most tokens of any step.
        attention: Who is to compute attention of long prompts.

    Raises:
        EnvironmentUnsupportedError: What `attention` names cannot be used here.
        PoolAllocationError: There is no room for the pool.
        CudaCallError: CUDA failed, or is not there.
    """
    began_s = time.monotonic()
    if device.index is None:
        pool = MemfdPool.create(host.layout)
        pool_s = time.monotonic() - began_s
        choice = _prepare(host, pool.kv, token_budget, attention)
        runner = ModelRunner(host.model, pool.kv, host.layout)
        return PrefillEngine(
            pool=pool, prefiller=EagerPrefiller(runner), attention=choice, pool_s=pool_s
        )
    cuda_pool = CudaIpcPool.create(host.layout, device=device.index)
    pool_s = time.monotonic() - began_s
    runner = ModelRunner(host.model, cuda_pool.kv, host.layout)
    stream = DeviceStream(host.model.device)
    choice = _prepare(host, cuda_pool.kv, token_budget, attention)
    warm_up_sampler(host.model.device, host.spec.vocab_size)
    # What no graph is for runs first without any: it must be compiled as well.
    plain = StreamPrefiller(runner, stream, cuda_pool.record)
    _warm_up(plain, host.layout, token_budget)
    graphs = PrefillGraphs(host.model, cuda_pool.kv, host.layout, stream, token_budget=token_budget)
    prefiller = StreamPrefiller(runner, stream, cuda_pool.record, graphs=graphs)
    _warm_up(prefiller, host.layout, token_budget)
    return PrefillEngine(pool=cuda_pool, prefiller=prefiller, attention=choice, pool_s=pool_s)


def _prepare(
    host: ModelHost, kv: Tensor, token_budget: int, attention: AttentionName
) -> AttentionChoice:
    """Have the model compile what it needs, and choose who computes attention."""
    longest = (host.layout.num_blocks - 1) * host.layout.block_size
    try:
        return host.model.prepare_prefill(
            kv,
            max_query_len=token_budget,
            max_context_len=min(longest, host.spec.max_context_tokens),
            attention=attention,
        )
    except AttentionUnavailableError as error:
        raise EnvironmentUnsupportedError(
            f"prefilld.attention cannot be {attention}: {error}",
            hint="`auto` takes what there is; README.md tells how to install a library",
        ) from error


def _warm_up(prefiller: Prefiller, layout: KVLayout, token_budget: int) -> None:
    """Have every kernel compiled before the first prompt waits for it.

    No block is anybody's yet, so the steps write where they like.
    """
    blocks = list(range(RESERVED_BLOCK + 1, layout.num_blocks))
    longest = min(token_budget, len(blocks) * layout.block_size // 2)
    lengths = sorted({1, min(17, longest), longest // 4 or 1, longest // 2 or 1, longest})
    for length in lengths:
        for start in (0, longest):  # a prompt's beginning, and its continuation
            step = SequenceStep(
                token_ids=[0] * length,
                start_position=start,
                block_table=blocks,
                sampling=SamplingParams(),
            )
            prefiller.launch([step])
            prefiller.collect()
