"""Times every kernel on one GPU against the bytes that it must move: a table, and JSON if asked.

`python -m tests.benchmarks.gpu_ops --json tests/benchmarks/results/h200_ops.json --commit HASH`

Launches are captured into a graph, one a layer as in a model's step, so a figure is what a layer
pays, the gap between launches included, and every launch reads memory that no cache holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from shared.ops.pool_pair import PoolPair
from shared.ops.rotary import rotary_angles
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.decode_attention import DecodeAttention
from shared.ops.triton.gather_blocks import gather_blocks
from shared.ops.triton.norm import add_rms_norm
from shared.ops.triton.rope_kv_write import rope_kv_write

if TYPE_CHECKING:
    from collections.abc import Callable

BANDWIDTH = 4.3e12
"""Bytes a second, reads and writes together, of a large copy or sweep on an H200."""

# The Llama-3.1-8B shape, bfloat16.
NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 32, 8, 128, 16
HIDDEN_SIZE, INTERMEDIATE_SIZE = 4_096, 14_336
TOKEN_LAYER_BYTES = 2 * NUM_KV_HEADS * HEAD_DIM * 2

MAX_POOL_BYTES = 24e9
MAX_COPIES_BYTES = 4e9

Figures = dict[str, float]


def time_launches(launch: Callable[[int], object], num_launches: int) -> float:
    """Return microseconds a launch: the median of 20 replays of a graph of `num_launches`."""
    launch(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launch(index)
    times_us: list[float] = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times_us.append(begin.elapsed_time(end) * 1e3 / num_launches)
    return statistics.median(times_us[3:])


def random_pool(num_blocks: int, num_layers: int) -> Tensor:
    """Return a pool of the shape above, full of random numbers."""
    shape = (num_blocks, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()


def decode_attention_us(batch: int, context_len: int) -> tuple[float, float]:
    """Return microseconds a layer, and the floor."""
    blocks_a_sequence = context_len // BLOCK_SIZE
    token_layers = batch * context_len * TOKEN_LAYER_BYTES
    num_layers = max(2, min(NUM_LAYERS, int(MAX_POOL_BYTES / token_layers)))
    pool = random_pool(batch * blocks_a_sequence, num_layers)
    tables = torch.randperm(pool.shape[0], device="cuda").int().view(batch, blocks_a_sequence)
    lengths = torch.full((batch,), context_len, dtype=torch.int32, device="cuda")
    width = NUM_HEADS + 2 * NUM_KV_HEADS
    qkv = torch.randn(batch, width, HEAD_DIM, device="cuda").bfloat16()
    cos, sin = torch.randn(2, batch, 1, HEAD_DIM, device="cuda")
    slots = tables[:, -1].long() * BLOCK_SIZE + BLOCK_SIZE - 1
    pools = PoolPair.of(pool)
    attend = DecodeAttention(
        max_batch=batch,
        max_context_len=context_len,
        num_heads=NUM_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        device="cuda",
    )
    measured = time_launches(
        lambda index: attend(
            qkv,
            cos,
            sin,
            slots,
            pools,
            tables,
            lengths,
            layer=index % num_layers,
            scale=HEAD_DIM**-0.5,
        ),
        NUM_LAYERS,
    )
    return measured, token_layers / BANDWIDTH * 1e6


def step_us(num_tokens: int) -> dict[str, tuple[float, float]]:
    """Return microseconds a layer, and the floor, of the kernels around attention."""
    width = NUM_HEADS + 2 * NUM_KV_HEADS
    row_bytes = 2 * (2 * INTERMEDIATE_SIZE + width * HEAD_DIM + 2 * HIDDEN_SIZE)
    copies = max(2, min(NUM_LAYERS, int(MAX_COPIES_BYTES / (num_tokens * row_bytes))))

    def make(*shape: int) -> list[Tensor]:
        numbers = (torch.randn(num_tokens, *shape, device="cuda") for _ in range(copies))
        return [tensor.bfloat16() for tensor in numbers]

    gates, heads = make(2 * INTERMEDIATE_SIZE), make(width, HEAD_DIM)
    hidden, residual = make(HIDDEN_SIZE), make(HIDDEN_SIZE)
    weight = torch.randn(HIDDEN_SIZE, device="cuda")
    pool = random_pool(-(-num_tokens // BLOCK_SIZE) + 1, copies)
    slots = torch.arange(num_tokens, device="cuda") + BLOCK_SIZE
    wavelengths = 500_000 ** -(torch.arange(0, HEAD_DIM, 2, device="cuda") / HEAD_DIM)
    cos, sin = rotary_angles(slots, wavelengths)
    launches: dict[str, tuple[Callable[[int], object], int]] = {
        "silu_mul": (lambda i: silu_mul(gates[i % copies]), 3 * INTERMEDIATE_SIZE * 2),
        "add_rms_norm": (
            lambda i: add_rms_norm(hidden[i % copies], residual[i % copies], weight, 1e-5),
            4 * HIDDEN_SIZE * 2,
        ),
        "rope_kv_write": (
            lambda i: rope_kv_write(heads[i % copies], cos, sin, pool[:, i % copies], slots),
            2 * width * HEAD_DIM * 2,
        ),
    }
    return {
        name: (time_launches(launch, NUM_LAYERS), num_tokens * num_bytes / BANDWIDTH * 1e6)
        for name, (launch, num_bytes) in launches.items()
    }


def gather_gb_s(num_programs: int, num_blocks: int = 250) -> float:
    """Return 10^9 bytes a second pulled of a 4,000-token prompt scattered over one GPU's memory."""
    source, target = (random_pool(4 * num_blocks, NUM_LAYERS) for _ in range(2))
    source_ids, target_ids = (
        torch.randperm(4 * num_blocks, device="cuda")[:num_blocks] for _ in range(2)
    )
    measured = time_launches(
        lambda _: gather_blocks(source, target, source_ids, target_ids, num_programs=num_programs),
        1,
    )
    num_bytes = num_blocks * source[0].numel() * source.element_size()
    return num_bytes / measured / 1e3


def main() -> None:
    """Measure everything, print it, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--commit", default="unknown", help="what the figures are of")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    figures: Figures = {}

    def note(name: str, measured: float, floor: float) -> None:
        figures[f"{name}_us"] = round(measured, 2)
        figures[f"{name}_floor_us"] = round(floor, 2)
        print(f"{name:32} {measured:9.2f} {floor:9.2f} {measured / floor:7.2f}", flush=True)

    print(f"{'':32} {'us':>9} {'floor':>9} {'ratio':>7}")
    for batch in (1, 16, 64):
        for context_len in (1_024, 4_096, 16_384):
            note(
                f"decode_attention_bs{batch}_{context_len}",
                *decode_attention_us(batch, context_len),
            )
            torch.cuda.empty_cache()
    for num_tokens in (1, 64, 4_096):
        for name, (measured, floor) in step_us(num_tokens).items():
            note(f"{name}_{num_tokens}", measured, floor)
    for num_programs in (4, 8, 16, 32, 64, 132):
        figures[f"gather_gb_s_{num_programs}"] = rate = round(gather_gb_s(num_programs), 1)
        print(f"gather, {num_programs:3} thread blocks: {rate:.0f} GB/s read, as many written")
    if arguments.json:
        command = " ".join(["python -m tests.benchmarks.gpu_ops", *sys.argv[1:]])
        result = {
            "hardware": (
                f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
                f"Triton {triton.__version__}"
            ),
            "commit": arguments.commit,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
