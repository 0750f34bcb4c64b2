"""The pair on one or two GPUs, seen from its clients; every figure as DESIGN's table defines it.

    python -m tests.benchmarks.gpu_pair --json FILE --commit HASH

Random weights of a named shape: compute and KV are real, the text is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tests.benchmarks.handover_stages import medians, print_timeline, rounded
from tests.benchmarks.results_file import Figures, gather
from tests.benchmarks.stream_clients import Ask, Clients, Heard
from tests.support.pair import Pair

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LLAMA_8B, LLAMA_70B = "random:llama-3.1-8b", "random:llama-3-70b"
VOCAB_SIZE = 128_256
START_TIMEOUT_S = 300.0

LENGTHS = (512, 4000, 16_000, 64_000)
"""Of prompts, in tokens."""

SHARES = {"prefilld__memory_fraction": 0.5, "decoded__memory_fraction": 0.2}
"""Of a GPU that both daemons use."""

LARGE_CHUNK = 700
"""Tokens of a prefill chunk of the large shape: what is left to hand over at the end is at most one
of them, 229 MB."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation."""
    return float(np.percentile(values, percent))


@contextmanager
def running_pair(model: str, devices: tuple[str, str], **settings: object) -> Iterator[Pair]:
    """Run a pair on these devices, in bfloat16, and say how long it took to serve."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            Path(folder),
            model=model,
            settings={
                "model.dtype": "bfloat16",
                "prefilld.device": devices[0],
                "decoded.device": devices[1],
                "pool.num_blocks": 0,
                "decoded.num_blocks": 0,
                "decoded.max_batch": 64,
                "log.level": "info",
            }
            | {key.replace("__", "."): value for key, value in settings.items()},
            start_timeout_s=START_TIMEOUT_S,
        )
        try:
            with pair:
                print(f"{model} on {devices}: {time.monotonic() - began_s:.0f} s", flush=True)
                yield pair
        except BaseException:
            print(pair.tail(4), flush=True)
            raise


def handover_figures(
    pair: Pair, clients: Clients, lengths: Sequence[int], *, num_asks: int, prefix: str = ""
) -> Figures:
    """Return TTFT, TPOT, gap and cost of the hand-over at batch 1, medians.

    With them go what prompt, pull and first step took the GPUs, where those had a part in it.
    """
    figures: Figures = {}
    for length in lengths:
        heard = [
            clients.hear(
                [Ask(num_prompt_tokens=length, num_tokens=34, seed=1000 * length + number)],
                lead_s=0.05,
            )[0]
            for number in range(num_asks + 1)
        ][1:]
        tpot_ms = statistics.median(itl for each in heard for itl in each.itls_ms[2:])
        costs = [(each.token_ns[1] - each.first_token_ns) / 1e6 - tpot_ms for each in heard]
        figures |= {
            f"{prefix}ttft_ms_{length}": statistics.median(each.ttft_ms for each in heard),
            f"{prefix}tpot_ms_bs1_{length}": tpot_ms,
            f"{prefix}gap_ms_{length}": statistics.median(each.gap_ms for each in heard),
            f"{prefix}handover_ms_{length}": statistics.median(costs),
        }
        stages = medians([each.handoff_ms for each in heard])
        device = medians([each.device_ms for each in heard])
        figures |= {f"{prefix}{name}_device_ms_{length}": ms for name, ms in device.items()}
        print(length, rounded({k: v for k, v in figures.items() if k.endswith(f"_{length}")}))
        print("   stages since token 1 was known, ms:", rounded(stages))
        print("   what they took the GPUs, ms:", rounded(device), flush=True)
        print_timeline(pair, f"bench-{1000 * length + num_asks}", heard[-1])
    return figures


def batch_itl_ms(clients: Clients, batch: int, *, num_tokens: int = 300) -> float:
    """Return the median gap between tokens while `batch` streams of 1,000-token prompts run.

    All of them run once the last prompt is computed, 0.4 s after the first of 16 and 1.7 s of 64:
    the contexts that are read then have 1,130 tokens on average, as those of the peer's figures.
    """
    asks = [
        Ask(num_prompt_tokens=1000, num_tokens=num_tokens, seed=batch * 1000 + number)
        for number in range(batch)
    ]
    heard = clients.hear(asks)
    everybody_ns = max(each.token_ns[1] for each in heard)
    first_end_ns = min(each.token_ns[-1] for each in heard)
    return statistics.median(_itls_within(heard, everybody_ns, first_end_ns))


def _itls_within(heard: Sequence[Heard], begin_ns: int, end_ns: int) -> list[float]:
    return [
        (later - earlier) / 1e6
        for each in heard
        for earlier, later in pairwise(each.token_ns[1:])
        if begin_ns <= earlier and later <= end_ns
    ]


def interference(clients: Clients, *, seconds: float = 6.0) -> Figures:
    """Return what 16 streams feel of a 4,000-token prompt that arrives every quarter second."""
    streams = [
        Ask(num_prompt_tokens=1000, num_tokens=1800, seed=77_000 + number) for number in range(16)
    ]
    arrivals = [
        Ask(num_prompt_tokens=4000, num_tokens=2, start_s=3.0 + 0.25 * number, seed=88_000 + number)
        for number in range(int(seconds / 0.25))
    ]
    heard = clients.hear([*streams, *arrivals])
    running = [each for each in heard if len(each.token_ns) > 2]
    prompts = [each for each in heard if len(each.token_ns) == 2]
    begin_ns = min(each.sent_ns for each in prompts)
    last_prompt_ns = max(each.token_ns[-1] for each in prompts)
    end_ns = min(last_prompt_ns, *(each.token_ns[-1] for each in running))
    itls = _itls_within(running, begin_ns, end_ns)
    before = _itls_within(running, max(each.token_ns[1] for each in running), begin_ns)
    return {
        "itl_p50_ms": percentile(itls, 50),
        "itl_p99_ms": percentile(itls, 99),
        "itl_max_ms": max(itls),
        "itl_p99_over_p50": percentile(itls, 99) / percentile(itls, 50),
        "itl_p50_alone_ms": percentile(before, 50),
        "ttft_beside_p50_ms": percentile([each.ttft_ms for each in prompts], 50),
        "ttft_beside_p99_ms": percentile([each.ttft_ms for each in prompts], 99),
    }


def adopt_us(pair: Pair, since: int = 0) -> list[float]:
    """Return how long each HANDOFF waited for its ADOPT, as prefilld logged it."""
    return [
        float(line["waited_us"])
        for line in pair.log("prefilld")[since:]
        if line.get("event") == "handoff.adopted"
    ]


def pulled(pair: Pair, request_id: str) -> list[tuple[float, float]]:
    """Return (milliseconds, 10^9 bytes a second) of each of a request's pulls, as logged."""
    block_bytes = pair.decoded_status()["pool"]["block_bytes"]
    lease_ids = {
        line["lease_id"]
        for line in pair.log("prefilld")
        if line.get("request_id") == request_id and "lease_id" in line
    }
    pulls = [
        ((line["done_ns"] - line["start_ns"]) / 1e6, line["num_blocks"] * block_bytes)
        for line in pair.log("decoded")
        if line["event"] == "chunk.pulled" and line["lease_id"] in lease_ids
    ]
    return [(took_ms, num_bytes / took_ms / 1e6) for took_ms, num_bytes in pulls]


def two_gpus(devices: tuple[str, str], *, num_asks: int, lengths: Sequence[int]) -> Figures:
    """Measure the 8B shape with a GPU for each daemon."""
    figures: Figures = {}
    with (
        running_pair(LLAMA_8B, devices) as pair,
        Clients(pair.socket, vocab_size=VOCAB_SIZE, num_processes=8) as clients,
    ):
        print(json.dumps(pair.status()["link"]), flush=True)
        figures |= handover_figures(pair, clients, lengths, num_asks=num_asks)
        figures["handoff_adopt_us_p50"] = percentile(adopt_us(pair), 50)
        figures["itl_ms_bs16"] = batch_itl_ms(clients, 16)
        num_lines = len(pair.log("prefilld"))
        figures["itl_ms_bs64"] = batch_itl_ms(clients, 64)
        figures["handoff_adopt_us_p99_bs64"] = percentile(adopt_us(pair, num_lines), 99)
        figures |= interference(clients)
    return figures


def one_gpu(device: str, *, num_asks: int, lengths: Sequence[int]) -> Figures:
    """Measure the 8B shape with both daemons on one GPU: nothing is copied, time is shared."""
    figures: Figures = {}
    with (
        running_pair(LLAMA_8B, (device, device), **SHARES) as pair,
        Clients(pair.socket, vocab_size=VOCAB_SIZE, num_processes=8) as clients,
    ):
        print(json.dumps(pair.status()["link"]), flush=True)
        found = handover_figures(pair, clients, lengths, num_asks=num_asks)
        figures |= {f"direct_{name}": value for name, value in found.items() if "handover" in name}
        figures |= {f"one_gpu_{name}": value for name, value in found.items()}
        beside = interference(clients)
        figures |= {f"one_gpu_{name}": value for name, value in beside.items()}
        figures["itl_p99_over_p50_one_gpu"] = beside["itl_p99_over_p50"]
    return figures


def large_model(devices: tuple[str, str], *, num_asks: int) -> Figures:
    """Measure the hand-over of a 4,000-token prompt whose cache has 80 layers.

    Nothing of it is pulled where both devices are one.
    """
    is_shared = devices[0] == devices[1]
    with (
        running_pair(
            LLAMA_70B,
            devices,
            prefilld__token_budget=LARGE_CHUNK,
            decoded__max_batch=8,
            log__level="debug",  # tells of each pull
            **(SHARES if is_shared else {}),
        ) as pair,
        Clients(pair.socket, vocab_size=VOCAB_SIZE, num_processes=1) as clients,
    ):
        found = handover_figures(pair, clients, (4000,), num_asks=num_asks)
        prefix = "direct_70b_" if is_shared else "70b_"
        device = {f"{prefix}{name}": ms for name, ms in found.items() if "_device_ms_" in name}
        if is_shared:
            return device | {"direct_handover_70b_ms_4000": found["handover_ms_4000"]}
        pulls = pulled(pair, f"bench-{4_000_000 + num_asks}")
        print("pulls, ms and GB/s:", [(round(a, 2), round(b)) for a, b in pulls], flush=True)
    return device | {
        "handover_70b_4000_total_ms": sum(took_ms for took_ms, _ in pulls),
        "handover_70b_4000_exposed_ms": found["handover_ms_4000"],
        "ttft_70b_4000_ms": found["ttft_ms_4000"],
        "tpot_70b_4000_ms": found["tpot_ms_bs1_4000"],
    }


PHASES = ("two", "one", "large", "large-one")


def write_figures(figures: Figures, path: Path | None, commit: str, program: str) -> None:
    """Print figures, and write them to a file with where they come from."""
    for name, value in figures.items():
        print(f"{name:32} {value:10.3f}", flush=True)
    if path is not None:
        gather(figures, path, program=program, commit=commit)


def main() -> None:
    """Measure, print a table, and write the file that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--asks", type=int, default=7, help="requests a figure")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)), help="of prompts")
    parser.add_argument("--phases", default=",".join(PHASES), help="which of " + ", ".join(PHASES))
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    phases = arguments.phases.split(",")
    devices = "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    figures: Figures = {}
    if "two" in phases:
        figures |= two_gpus(devices, num_asks=arguments.asks, lengths=lengths)
    if "one" in phases:
        figures |= one_gpu(devices[0], num_asks=arguments.asks, lengths=lengths)
    if "large" in phases:
        figures |= large_model(devices, num_asks=arguments.asks)
    if "large-one" in phases:
        figures |= large_model((devices[0], devices[0]), num_asks=arguments.asks)
    write_figures(figures, arguments.json, arguments.commit, "tests.benchmarks.gpu_pair")


if __name__ == "__main__":
    main()
