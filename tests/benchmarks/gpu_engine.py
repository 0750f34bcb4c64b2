"""Where a daemon's engine spends its time on a GPU: the host's part and the GPU's, one by one.

    python -m tests.benchmarks.gpu_engine

The 8B shape with random weights; microseconds, medians.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import SequenceStep
from shared.engine.block_puller import CudaPuller
from shared.engine.decoding import DecodeStep
from shared.engine.device_stream import DeviceStream
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.layout import KVLayout
from shared.model.llama import Llama
from shared.model.loader import load_model
from shared.ops.pool_pair import PoolPair
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

GREEDY = SamplingParams()
NUM_BLOCKS = 8192


def timed_us(call: Callable[[], object]) -> float:
    """Return how long the host takes for a call."""
    began_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - began_ns) / 1e3


def decode_lines(decoder: GraphDecoder, batch: int, context_len: int) -> None:
    """Print what a step takes when it is launched ahead, and when the GPU was idle before."""
    blocks_each = -(-(context_len + 300) // 16)
    tables = [
        list(range(1 + row * blocks_each, 1 + (row + 1) * blocks_each)) for row in range(batch)
    ]

    def steps(ahead: int, *, is_known: bool) -> list[DecodeStep]:
        return [
            DecodeStep(
                key=(batch, context_len, row),
                token_id=5 if is_known else None,
                position=context_len + ahead,
                block_table=tables[row],
                sampling=GREEDY,
            )
            for row in range(batch)
        ]

    firsts: list[float] = []
    for _ in range(4):
        time.sleep(0.2)
        began_ns = time.perf_counter_ns()
        decoder.launch(steps(0, is_known=True))
        decoder.collect()
        firsts.append((time.perf_counter_ns() - began_ns) / 1e3)
    decoder.launch(steps(0, is_known=True))
    launches, collects, walls = [], [], []
    last_ns = time.perf_counter_ns()
    for ahead in range(1, 60):
        prepared = steps(ahead, is_known=False)
        launches.append(timed_us(lambda prepared=prepared: decoder.launch(prepared)))
        collects.append(timed_us(decoder.collect))
        now_ns = time.perf_counter_ns()
        walls.append((now_ns - last_ns) / 1e3)
        last_ns = now_ns
    decoder.collect()
    print(
        f"decode batch {batch:3} at {context_len:5}: step {statistics.median(walls[5:]):7.0f}"
        f"  host launch {statistics.median(launches[5:]):5.0f}"
        f"  first after 200 ms idle {statistics.median(firsts[1:]):7.0f}"
        f" (first of all {firsts[0]:.0f})",
        flush=True,
    )


def prefill_lines(prefiller: StreamPrefiller, lengths: tuple[int, ...], budget: int) -> None:
    """Print what a prompt takes, in chunks of `budget` tokens with two in flight."""
    for length in lengths:
        table = list(range(1, 2 + length // 16))
        walls, hosts = [], []
        for _ in range(4):
            time.sleep(0.1)
            began_ns = time.perf_counter_ns()
            host_us = 0.0
            for start in range(0, length, budget):
                stop = min(length, start + budget)
                step = SequenceStep(
                    token_ids=[5] * (stop - start),
                    start_position=start,
                    block_table=table,
                    sampling=GREEDY if stop == length else None,
                )
                if prefiller.num_in_flight == 2:
                    prefiller.collect()
                host_us += timed_us(lambda step=step: prefiller.launch([step]))
            while prefiller.num_in_flight:
                prefiller.collect()
            walls.append((time.perf_counter_ns() - began_ns) / 1e3)
            hosts.append(host_us)
        print(
            f"prefill {length:6}: {statistics.median(walls[1:]) / 1e3:8.2f} ms"
            f"  host {statistics.median(hosts[1:]) / 1e3:6.2f} ms  (first {walls[0] / 1e3:.1f})",
            flush=True,
        )


def pull_lines(puller: CudaPuller, source: torch.Tensor) -> None:
    """Print what pulling a last chunk takes, from one GPU to itself."""
    for num_blocks in (32, 128, 250):
        walls, hosts = [], []
        for _ in range(8):
            time.sleep(0.02)
            ids = torch.randperm(4000)[: 2 * num_blocks].add_(1).tolist()
            pending = puller.prepare(source, ids[:num_blocks], ids[num_blocks:])
            torch.cuda.synchronize()
            began_ns = time.perf_counter_ns()
            pending.start(is_busy=False)
            hosts.append((time.perf_counter_ns() - began_ns) / 1e3)
            while not pending.is_done():
                pass
            walls.append((time.perf_counter_ns() - began_ns) / 1e3)
        print(
            f"pull {num_blocks:4} blocks: {statistics.median(walls):7.0f}"
            f"  host {statistics.median(hosts):5.0f}  (first {walls[0]:.0f})",
            flush=True,
        )


@torch.inference_mode()
def main() -> None:
    """Measure everything and print it."""
    loaded = load_model("random:llama-3.1-8b", "bfloat16", "cuda:0")
    model = Llama(loaded.spec, loaded.tensors)
    layout = KVLayout(
        num_blocks=NUM_BLOCKS,
        num_layers=loaded.spec.num_layers,
        num_kv_heads=loaded.spec.num_kv_heads,
        block_size=16,
        head_dim=loaded.spec.head_dim,
        dtype="bfloat16",
    )
    pool = LocalCudaPool.create(layout, device=0)
    pool.kv.normal_()
    other = LocalCudaPool.create(layout.with_num_blocks(4096), device=0)
    print(f"loaded, {torch.cuda.get_device_name(0)}; microseconds unless they say ms", flush=True)
    began_s = time.monotonic()
    decoder = GraphDecoder(
        model, PoolPair.of(pool.kv), layout, max_batch=64, max_context_len=131_072
    )
    print(f"graphs captured in {time.monotonic() - began_s:.1f} s", flush=True)
    for batch, context_len in ((1, 512), (1, 4000), (1, 16_000), (16, 1000), (64, 1000)):
        decode_lines(decoder, batch, context_len)
    pull_lines(CudaPuller(pool.kv), other.kv)
    prefiller = StreamPrefiller(
        ModelRunner(model, pool.kv, layout), DeviceStream(model.device), lambda _: 0
    )
    prefill_lines(prefiller, (512, 1000, 4000, 16_000), 2048)


if __name__ == "__main__":
    main()
