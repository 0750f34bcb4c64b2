"""Pulling over NVLink, alone and beside decode steps, by a kernel and by the copy engine.

    python -m tests.benchmarks.gpu_pull --json FILE --commit HASH

One process that sees both GPUs moves the same bytes over the same way as a mapping does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from shared.engine.block_puller import IDLE_PROGRAMS, MIN_RUN_BLOCKS
from shared.engine.decoding import DecodeStep
from shared.engine.graph_decoder import GraphDecoder
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.layout import KVLayout
from shared.model.llama import Llama
from shared.model.loader import load_model
from shared.ops.pool_pair import PoolPair
from shared.ops.triton.gather_blocks import gather_blocks
from tests.benchmarks.gpu_engine import GREEDY
from tests.benchmarks.gpu_pair import write_figures
from tests.benchmarks.results_file import Figures

PROGRAMS = (4, 8, 16, 32, 64, 128)
RUNS = (1, MIN_RUN_BLOCKS, 25, 125)
"""Neighbouring blocks that the copy engine takes at once."""

NUM_BLOCKS = 250
"""4,000 tokens in blocks of 16: 524 MB of the 8B shape."""

BATCH, CONTEXT = 16, 1000


class Pull:
    """The same scattered blocks, pulled again and again on a side stream by a kernel.

    Args:
        source: A pool on the one GPU.
        target: A pool on the other.
        num_programs: Thread blocks of the kernel.
    """

    def __init__(self, source: torch.Tensor, target: torch.Tensor, num_programs: int) -> None:
        self._source, self._target, self._num_programs = source, target, num_programs
        self.stream = torch.cuda.Stream(target.device)
        self._ids = [
            torch.randperm(size - 1, device=target.device)[:NUM_BLOCKS] + 1
            for size in (source.shape[0], target.shape[0])
        ]
        self.num_bytes = NUM_BLOCKS * source[0].numel() * source.element_size()

    def launch(self) -> None:
        """Enqueue one pull."""
        with torch.cuda.stream(self.stream):
            gather_blocks(self._source, self._target, *self._ids, num_programs=self._num_programs)

    def alone_gb_s(self) -> float:
        """Return 10^9 bytes a second with nothing beside it."""
        times: list[float] = []
        for _ in range(8):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(self.stream)
            self.launch()
            end.record(self.stream)
            self.stream.synchronize()
            times.append(begin.elapsed_time(end))
        return self.num_bytes / statistics.median(times[2:]) / 1e6


class RunPull(Pull):
    """The same by the copy engine, in runs of `run_blocks` neighbours."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, run_blocks: int) -> None:
        super().__init__(source, target, 0)
        num_runs = NUM_BLOCKS // run_blocks
        self._runs = list(
            zip(
                *(
                    [1 + run_blocks * place for place in places[:num_runs]]
                    for places in (
                        torch.randperm((pool.shape[0] - 1) // run_blocks).tolist()
                        for pool in (source, target)
                    )
                ),
                strict=True,
            )
        )
        self._run_blocks = run_blocks
        self.num_bytes = self.num_bytes // NUM_BLOCKS * num_runs * run_blocks

    def launch(self) -> None:
        """Enqueue one pull."""
        length = self._run_blocks
        with torch.cuda.stream(self.stream):
            for first, to in self._runs:
                self._target[to : to + length].copy_(
                    self._source[first : first + length], non_blocking=True
                )


class Decode:
    """A batch that decodes, with two steps in flight."""

    def __init__(self, decoder: GraphDecoder, first_block: int) -> None:
        self._decoder, self._position = decoder, CONTEXT
        blocks_each = -(-(CONTEXT + 600) // 16)
        self._tables = [
            list(range(first_block + row * blocks_each, first_block + (row + 1) * blocks_each))
            for row in range(BATCH)
        ]
        self._launch(is_known=True)

    def _launch(self, *, is_known: bool = False) -> None:
        self._decoder.launch(
            [
                DecodeStep(
                    key=row,
                    token_id=5 if is_known else None,
                    position=self._position,
                    block_table=self._tables[row],
                    sampling=GREEDY,
                )
                for row in range(BATCH)
            ]
        )
        self._position += 1

    def step_ms(self, num_steps: int, pull: Pull | None) -> tuple[float, float]:
        """Return milliseconds a step, and the pull's rate beside it in 10^9 bytes a second."""
        num_pulls = 0
        marks: list[torch.cuda.Event] = []
        torch.cuda.synchronize()
        self._decoder.collect()
        self._launch(is_known=True)
        began_s = time.perf_counter()
        for _ in range(num_steps):
            self._launch()
            if pull is not None:
                marks = [mark for mark in marks if not mark.query()]
                while len(marks) < 2:  # always one behind the running one
                    pull.launch()
                    mark = torch.cuda.Event()
                    mark.record(pull.stream)
                    marks.append(mark)
                    num_pulls += 1
            self._decoder.collect()
        took_s = time.perf_counter() - began_s
        if pull is not None:
            pull.stream.synchronize()
            rate = (num_pulls - 2) * pull.num_bytes / took_s / 1e9
        else:
            rate = 0.0
        return took_s / num_steps * 1e3, rate


@torch.inference_mode()
def measure() -> Figures:
    """Measure on the second GPU, pulling from the first."""
    first, second = 0, torch.cuda.device_count() - 1
    torch.cuda.set_device(second)
    if first != second:
        from cupy.cuda import runtime

        torch.zeros(1, device=f"cuda:{second}")
        runtime.setDevice(second)
        runtime.deviceEnablePeerAccess(first)
    loaded = load_model("random:llama-3.1-8b", "bfloat16", f"cuda:{second}")
    layout = KVLayout(
        num_blocks=4096,
        num_layers=loaded.spec.num_layers,
        num_kv_heads=loaded.spec.num_kv_heads,
        block_size=16,
        head_dim=loaded.spec.head_dim,
        dtype="bfloat16",
    )
    source = torch.empty(
        layout.with_num_blocks(1024).shape, dtype=torch.bfloat16, device=f"cuda:{first}"
    ).normal_()
    pool = LocalCudaPool.create(layout, device=second)
    pool.kv.normal_()
    target = pool.kv[:2048]
    pulls = {f"{count}": Pull(source, target, count) for count in PROGRAMS}
    pulls |= {f"run_{length}": RunPull(source, target, length) for length in RUNS}
    figures: Figures = {f"pull_gb_s_{way}": pull.alone_gb_s() for way, pull in pulls.items()}
    figures["pull_gb_s"] = figures[f"pull_gb_s_{IDLE_PROGRAMS}"]
    decoder = GraphDecoder(
        Llama(loaded.spec, loaded.tensors),
        PoolPair.of(pool.kv),
        layout,
        max_batch=BATCH,
        max_context_len=4096,
    )
    decode = Decode(decoder, 2048)
    decode.step_ms(20, pulls["8"])
    alone_ms, _ = decode.step_ms(60, None)
    for way, pull in pulls.items():
        beside_ms, rate = decode.step_ms(40, pull)
        figures[f"pull_gb_s_beside_decode_{way}"] = rate
        figures[f"step_slowdown_pct_{way}"] = (beside_ms / alone_ms - 1) * 100
    figures["step_ms_alone"] = alone_ms
    # What decoded does where blocks come in runs long enough.
    figures["pull_gb_s_beside_decode"] = figures[f"pull_gb_s_beside_decode_run_{MIN_RUN_BLOCKS}"]
    figures["step_slowdown_pct"] = figures[f"step_slowdown_pct_run_{MIN_RUN_BLOCKS}"]
    return figures


def main() -> None:
    """Measure, print, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    write_figures(measure(), arguments.json, arguments.commit, "tests.benchmarks.gpu_pull")


if __name__ == "__main__":
    main()
