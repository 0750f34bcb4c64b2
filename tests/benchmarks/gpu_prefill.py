"""Times prompts of the Llama-3.1-8B shape on one GPU: captured and plain, in chunks of any sizes.

    python -m tests.benchmarks.gpu_prefill [--part short|long|attention] [--attention NAME]

Random weights.  A prompt is timed as a daemon runs it, from its token ids on the host to its first
token on the host, two steps in flight; `host` is the part in which the host launches.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import SequenceStep
from shared.engine.device_stream import DeviceStream
from shared.engine.prefill_graphs import PrefillGraphs
from shared.engine.runner import ModelRunner
from shared.engine.stream_prefiller import StreamPrefiller
from shared.engine.workspace import prefill_workspace_bytes
from shared.kv.layout import KVLayout
from shared.ops.attention import SequenceSpan
from shared.ops.sampling import SamplingParams
from shared.ops.tiled_attention import TILE_ROWS
from shared.ops.triton.prefill_attention import prefill_attention
from shared.ops.triton.tiled_attention import TilePlan, tiled_attention
from tests.benchmarks.gpu_forward import NUM_BLOCKS, VOCAB_SIZE, graph_ms, model_and_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS = ("short", "long", "attention")
NUM_RUNS = 7

SHORT = (
    (16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (520, 0), (1_000, 0),
    (64, 2_048), (64, 8_192), (512, 2_048), (1_000, 1_024),
)  # fmt: skip
"""Tokens to compute, and tokens that the prefix cache had."""

LONG: dict[str, tuple[int, ...]] = {
    "4,000: 2,048s": (2_048, 1_952),
    "4,000: half behind": (2_560, 1_440),
    "16,000: 2,048s": (*(2_048,) * 7, 1_664),
    "16,000: 4,096s": (4_096, 4_096, 4_096, 2_560, 1_152),
    "16,000: 8,192 first": (8_192, 4_096, 2_560, 1_152),
}

PLANS = (
    TilePlan(),
    TilePlan(num_stages=3),
    TilePlan(num_stages=4),
    TilePlan(tile_bytes=32 << 10, num_stages=2),
    TilePlan(tile_bytes=32 << 10, num_warps=8, num_stages=2),
)


def run_prompt(
    prefiller: StreamPrefiller, chunks: Sequence[int], before: int
) -> tuple[float, float]:
    """Run one prompt; return milliseconds in all, and those that launching took."""
    blocks = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    token_ids = torch.randint(VOCAB_SIZE, (sum(chunks),)).tolist()
    torch.cuda.synchronize()
    time.sleep(0.05)  # as a daemon waits for its next prompt
    host_s, start, begin_s = 0.0, 0, time.perf_counter()
    for length in chunks:
        if prefiller.num_in_flight == prefiller.depth:
            prefiller.collect()
        launch_s = time.perf_counter()
        step = SequenceStep(
            token_ids=token_ids[start : start + length],
            start_position=before + start,
            block_table=blocks,
            sampling=SamplingParams() if start + length == len(token_ids) else None,
        )
        prefiller.launch([step])
        host_s += time.perf_counter() - launch_s
        start += length
    while prefiller.num_in_flight:
        prefiller.collect()
    return (time.perf_counter() - begin_s) * 1e3, host_s * 1e3


def medians(prefiller: StreamPrefiller, chunks: Sequence[int], before: int) -> tuple[float, float]:
    """Return the medians of several runs, the first one left out."""
    runs = [run_prompt(prefiller, chunks, before) for _ in range(NUM_RUNS)][1:]
    return statistics.median(total for total, _ in runs), statistics.median(
        host for _, host in runs
    )


def short_lines(plain: StreamPrefiller, captured: StreamPrefiller) -> None:
    """Print what short prompts take either way."""
    print(
        f"{'tokens':>7} {'before':>7} | {'plain ms':>9} {'host':>7} | {'captured':>9} {'host':>7}"
    )
    for length, before in SHORT:
        figures = [
            f"{total:9.2f} {host:7.2f}"
            for total, host in (medians(each, (length,), before) for each in (plain, captured))
        ]
        print(f"{length:7} {before:7} | {' | '.join(figures)}", flush=True)


def long_lines(prefiller: StreamPrefiller) -> None:
    """Print what long prompts take by the sizes of their chunks."""
    for name, chunks in LONG.items():
        total, host = medians(prefiller, chunks, 0)
        print(f"{name:22} {total:8.1f} ms, host {host:6.1f}  {chunks}", flush=True)


def attention_lines(kv: torch.Tensor, layout: KVLayout, num_heads: int) -> None:
    """Print microseconds a layer of attention by tiles, and of what longer prompts take."""
    layer = kv[:, 0]
    for length, before in (
        (16, 0),
        (64, 2_048),
        (512, 0),
        (512, 2_048),
        (1_024, 0),
        (1_024, 2_048),
    ):
        context_len = length + before
        num_blocks = layout.num_blocks_for(context_len)
        table = torch.randperm(NUM_BLOCKS - 1, device="cuda")[:num_blocks] + 1
        tiles = torch.tensor(
            [
                (row, min(TILE_ROWS, length - row), before + row, 0)
                for row in reversed(range(0, length, TILE_ROWS))
            ],
            device="cuda",
        )
        query = torch.randn(length, num_heads, layout.head_dim, device="cuda").bfloat16()
        span = SequenceSpan(
            query_start=0, query_len=length, context_len=context_len, block_table=table
        )
        calls: list[Callable[[], object]] = [
            partial(tiled_attention, query, layer, tiles, table, scale=0.1, plan=plan)
            for plan in PLANS
        ]
        calls.append(partial(prefill_attention, query, layer, [span], scale=0.1))
        figures = " ".join(f"{graph_ms(partial(repeat, call)) * 1e3 / 32:8.1f}" for call in calls)
        print(
            f"attention {length:5} behind {before:5}: us by plan, plain last: {figures}", flush=True
        )


def repeat(call: Callable[[], object]) -> None:
    """Call as often as a step has layers."""
    for _ in range(32):
        call()


@torch.inference_mode()
def main() -> None:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--part", action="append", choices=PARTS, help="all by default")
    parser.add_argument("--attention", default="auto", help="as `prefilld.attention`")
    arguments = parser.parse_args()
    parts = arguments.part or PARTS
    model, layout, kv = model_and_pool()
    begin_s = time.perf_counter()
    choice = model.prepare_prefill(
        kv, max_query_len=8_192, max_context_len=16_384, attention=arguments.attention
    )
    print(f"attention: {choice}, {time.perf_counter() - begin_s:.1f} s", flush=True)
    stream = DeviceStream(model.device)
    runner = ModelRunner(model, kv, layout)
    plain = StreamPrefiller(runner, stream, lambda _: 0)
    if "short" in parts:
        medians(plain, (1_024,), 0)  # cuBLAS and the allocator have what they need
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        begin_s, (free_bytes, _) = time.perf_counter(), torch.cuda.mem_get_info()
        graphs = PrefillGraphs(model, kv, layout, stream, token_budget=2_048)
        torch.cuda.synchronize()
        took_s, (still_free_bytes, _) = time.perf_counter() - begin_s, torch.cuda.mem_get_info()
        allowed = prefill_workspace_bytes(model.spec, layout, token_budget=2_048)
        print(
            f"captured in {took_s:.1f} s, {(free_bytes - still_free_bytes) / 1e6:.0f} MB of "
            f"{allowed / 1e6:.0f} set aside"
        )
        short_lines(plain, StreamPrefiller(runner, stream, lambda _: 0, graphs=graphs))
    if "long" in parts:
        long_lines(plain)
    if "attention" in parts:
        attention_lines(kv, layout, model.spec.num_heads)


if __name__ == "__main__":
    main()
