"""Times whole steps of the Llama-3.1-8B shape on one GPU: a table, and JSON if asked.

`python -m tests.benchmarks.gpu_forward --json FILE --commit HASH`

A decode step is a CUDA graph from token ids to the likeliest next ones.  A prompt is timed from its
token ids on the host to its first token on the host, in chunks of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import SequenceStep
from shared.engine.runner import ModelRunner
from shared.kv.layout import KVLayout
from shared.model.batch import DecodeBatch
from shared.model.llama import Llama
from shared.model.loader import load_model
from shared.ops.batch_sampling import SamplingTensors
from shared.ops.pool_pair import PoolPair
from shared.ops.sampler import sampler_for
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "random:llama-3.1-8b"
BLOCK_SIZE, NUM_BLOCKS = 16, 6_000
TOKEN_BUDGET = 2_048
VOCAB_SIZE = 128_256

DECODES = ((1, 4_000), (4, 1_000), (16, 1_000), (32, 1_000), (64, 1_000))
PROMPTS = (512, 4_000, 16_000)

WEIGHT_BYTES = 15.01e9
TOKEN_BYTES = 131_072
BANDWIDTH = 4.3e12
LIMITS_MS = {512: 9.1, 4_000: 76.0, 16_000: 368.0}
"""Of a prompt, at the rate of the largest matrix product, 790 TFLOP/s."""


def graph_ms(step: Callable[[], object], *, num_replays: int = 20) -> float:
    """Return the median time of a captured step, in milliseconds."""
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times_ms: list[float] = []
    for _ in range(num_replays + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times_ms.append(begin.elapsed_time(end))
    return statistics.median(times_ms[2:])


def decode_batch(batch: int, context_len: int) -> DecodeBatch:
    """Return rows whose contexts are scattered over the pool."""
    num_blocks = -(-context_len // BLOCK_SIZE)
    ids = torch.randperm(NUM_BLOCKS - 1, device="cuda")[: batch * num_blocks] + 1
    tables = ids.int().view(batch, num_blocks)
    position = context_len - 1
    return DecodeBatch(
        token_ids=torch.randint(VOCAB_SIZE, (batch,), device="cuda"),
        positions=torch.full((batch,), position, device="cuda"),
        slot_mapping=tables[:, -1].long() * BLOCK_SIZE + position % BLOCK_SIZE,
        block_tables=tables,
        context_lens=torch.full((batch,), context_len, dtype=torch.int32, device="cuda"),
    )


def decode_step(model: Llama, rows: DecodeBatch, pools: PoolPair) -> torch.Tensor:
    """Compute one step, token ids to token ids."""
    return model.likeliest(model.decode(rows, pools))


def prompt_ms(runner: ModelRunner, num_tokens: int) -> list[float]:
    """Return the times of six runs of a prompt, the first of which compiles what is missing."""
    blocks = (torch.randperm(NUM_BLOCKS - 1) + 1).tolist()
    token_ids = torch.randint(VOCAB_SIZE, (num_tokens,)).tolist()
    times_ms: list[float] = []
    for _ in range(7):
        begin_s = time.perf_counter()
        for start in range(0, num_tokens, TOKEN_BUDGET):
            chunk = token_ids[start : start + TOKEN_BUDGET]
            is_last = start + len(chunk) == num_tokens
            step = SequenceStep(
                token_ids=chunk,
                start_position=start,
                block_table=blocks,
                sampling=SamplingParams() if is_last else None,
            )
            runner.execute([step])
        times_ms.append((time.perf_counter() - begin_s) * 1e3)
    return times_ms


def model_and_pool() -> tuple[Llama, KVLayout, torch.Tensor]:
    """Return the shape's model on the GPU, and a pool for it that is full of random numbers."""
    loaded = load_model(MODEL, "bfloat16", "cuda")
    model = Llama(loaded.spec, loaded.tensors)
    layout = model.spec.kv_layout(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="bfloat16")
    kv = torch.empty(layout.shape, dtype=torch.bfloat16, device="cuda").normal_()
    return model, layout, kv


def main() -> None:
    """Measure everything, print it, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--commit", default="unknown", help="what the figures are of")
    arguments = parser.parse_args()
    figures: dict[str, float] = {}

    def note(name: str, measured_ms: float, limit_ms: float) -> None:
        figures[f"{name}_ms"] = round(measured_ms, 3)
        print(f"{name:28} {measured_ms:9.3f} {limit_ms:9.3f}", flush=True)

    model, layout, kv = model_and_pool()
    pools = PoolPair.of(kv)
    print(f"{'':28} {'ms':>9} {'limit':>9}")
    with torch.inference_mode():
        model.prepare_decode(max_batch=64, max_context_len=8_192)
        for batch, context_len in DECODES:
            rows = decode_batch(batch, context_len)
            limit_ms = (WEIGHT_BYTES + batch * context_len * TOKEN_BYTES) / BANDWIDTH * 1e3
            note(
                f"decode_bs{batch}_{context_len}",
                graph_ms(partial(decode_step, model, rows, pools)),
                limit_ms,
            )
        logits = torch.randn(64, VOCAB_SIZE, device="cuda")
        sample = sampler_for(logits.device)
        for name, params in {
            "greedy": SamplingParams(),
            "hot": SamplingParams(temperature=0.8, seed=1),
            "top_p": SamplingParams(temperature=0.8, top_p=0.9, seed=1),
            "top_k_top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=1),
        }.items():
            how = SamplingTensors.of([params] * 64, list(range(64)), "cuda")
            note(f"sample_bs64_{name}", graph_ms(partial(sample, logits, how)), 0.008)
        runner = ModelRunner(model, kv, layout)
        begin_s = time.perf_counter()
        model.prepare_prefill(kv, max_query_len=TOKEN_BUDGET, max_context_len=16_384)
        torch.cuda.synchronize()
        figures["prepare_prefill_s"] = round(time.perf_counter() - begin_s, 1)
        for num_tokens in PROMPTS:
            times_ms = prompt_ms(runner, num_tokens)
            print(f"  {[round(each, 1) for each in times_ms]}")
            note(f"prefill_{num_tokens}", statistics.median(times_ms[1:]), LIMITS_MS[num_tokens])
    if arguments.json:
        command = " ".join(["python -m tests.benchmarks.gpu_forward", *sys.argv[1:]])
        result = {
            "hardware": f"1 x {torch.cuda.get_device_name()}, torch {torch.__version__}",
            "commit": arguments.commit,
            "date": datetime.now(UTC).date().isoformat(),
            "command": command,
            "figures": figures,
        }
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
