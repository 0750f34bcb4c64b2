"""What a pair on GPUs must show beside its speed: that every block arrives, and what deaths cost.

    python -m tests.benchmarks.gpu_shown --json FILE --commit HASH

Each phase runs in a process of its own and ends in figures, some of which have bounds.  Exits with
1 where a phase failed or a bound was missed; what was measured is written all the same, and phases
that are run one by one gather in one file.  The phase
`smollm2` needs the embedded model's file (`kvpair model fetch smollm2-135m-instruct`).
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.benchmarks.deaths import Load, check_deaths
from tests.benchmarks.gpu_pair import LLAMA_8B, VOCAB_SIZE
from tests.benchmarks.results_file import Figures, gather
from tests.benchmarks.shown_bounds import missed
from tests.benchmarks.steadiness import check_steadiness
from tests.support.gpus import device_index, pair_devices
from tests.support.handovers.plan import BLOCKS_8B, LATE_MS, Plan
from tests.support.handovers.run import run_handovers
from tests.support.pair import write_tiny_model
from tests.support.pool_ends import BothEngines, check_both_ends
from tests.support.smollm2_answers import (
    check_one_process,
    check_pair,
    engine_on,
    exact_references,
    rounding_errors,
)

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = "tests.benchmarks.gpu_shown"

SMALL_BLOCKS = dataclasses.replace(BLOCKS_8B, num_layers=1)
"""For a CPU, which makes random bits a hundred times slower."""

POOL_SHARE = {True: 0.6, False: 0.35}
"""Of a GPU's memory, for prefilld's pool: by whether it has the GPU to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    num_handovers: int = 10_000
    num_late: int = 200
    """Hand-overs whose writes are late on purpose."""
    num_cycles: int = 100
    num_restarts: int = 10


TRIAL = Sizes(num_handovers=200, num_late=50, num_cycles=4, num_restarts=2)
"""To try the command itself."""


def handovers(sizes: Sizes) -> Figures:
    """Compare hand-overs block by block; then with writes that are late, asked for and not."""
    maker, taker = map(device_index, pair_devices())
    plan = Plan(
        layout=SMALL_BLOCKS if maker is None else BLOCKS_8B,
        maker_device=maker,
        taker_device=taker,
        num_handovers=sizes.num_handovers,
        num_losses=sizes.num_handovers // 500 + 1,
        timeout_s=300,
    )
    all_of_it = run_handovers(plan)
    print(all_of_it, flush=True)
    figures = {
        "handovers_compared": float(all_of_it.num_handovers),
        "handovers_blocks_compared": float(all_of_it.num_blocks),
        "handovers_differing": float(all_of_it.num_differing),
        "handovers_voided": float(all_of_it.num_voided),
        "handovers_aborted": float(all_of_it.num_aborted),
        "handovers_s": all_of_it.wall_s,
    }
    if maker is not None:  # on a CPU there is no event to ask
        late = dataclasses.replace(
            plan, num_handovers=sizes.num_late, num_losses=0, spin_ms=LATE_MS
        )
        asked = run_handovers(late)
        unasked = run_handovers(dataclasses.replace(late, reading="without the event"))
        figures |= {
            "late_compared": float(asked.num_handovers),
            "late_differing": float(asked.num_differing),
            "unasked_compared": float(unasked.num_handovers),
            "unasked_differing_share": unasked.num_differing / unasked.num_handovers,
        }
    return figures


def large_pool(_: Sizes) -> Figures:
    """Serve one request at the bottom and at the top of pools beyond 2^31 elements."""
    device = device_index(pair_devices()[0])
    with tempfile.TemporaryDirectory() as folder:
        engines = BothEngines(
            model=str(write_tiny_model(Path(folder))) if device is None else LLAMA_8B,
            dtype="float32" if device is None else "bfloat16",
            device=device,
            num_elements=1 << (20 if device is None else 31),
            num_prompt_tokens=1000,
        )
        bottom, top = check_both_ends(engines)
    return {
        "large_pool_blocks_below": float(engines.num_below),
        "large_pool_bottom_last_block": float(max(bottom.targets)),
        "large_pool_top_first_block": float(min(top.targets)),
        "large_pool_bits_compared": 8.0 * (bottom.kv.numel() + bottom.prompt_kv.numel()),
    }


def smollm2(_: Sizes) -> Figures:
    """Compare the embedded model's answers with the CPU's: one process, pulled, in place."""
    references = exact_references()
    devices = pair_devices()
    engine = engine_on(devices[0], "float32")
    check_one_process(engine, references)
    for access in ("pull", "direct"):
        with tempfile.TemporaryDirectory() as folder:
            check_pair(Path(folder), devices, access, references, engine)
    roundings = rounding_errors(engine_on(devices[0], "bfloat16"), engine, references)
    return {
        "smollm2_questions": float(len(references)),
        "smollm2_tokens": float(sum(len(each.ids) for each in references)),
        "smollm2_certain_tokens": float(sum(each.num_certain for each in references)),
        "smollm2_bf16_error": roundings.max_error,
        "smollm2_bf16_flips": roundings.flips,
    }


def deaths(_: Sizes) -> Figures:
    """Kill either daemon under sixteen streams and long prompts."""
    devices = pair_devices()
    index = device_index(devices[0])
    with tempfile.TemporaryDirectory() as folder:
        if index is None:
            load = Load(
                model=str(write_tiny_model(Path(folder))),
                devices=devices,
                vocab_size=250,
                stream_tokens=2000,
                stream_prompt_tokens=30,
                num_long=6,
                long_prompt_tokens=1200,
                settings={"decoded.num_blocks": 4000, "prefilld.token_budget": 64},
            )
        else:
            share = POOL_SHARE[devices[0] != devices[1]]
            total_bytes = torch.cuda.mem_get_info(index)[1]
            load = Load(
                model=LLAMA_8B,
                devices=devices,
                vocab_size=VOCAB_SIZE,
                stream_tokens=3000,
                stream_prompt_tokens=1000,
                num_long=6,
                long_prompt_tokens=16_000,
                settings={
                    "model.dtype": "bfloat16",
                    "pool.num_blocks": int(share * total_bytes) // BLOCKS_8B.block_bytes,
                    "decoded.num_blocks": 12_000,
                    "decoded.max_batch": 32,
                },
            )
        return check_deaths(Path(folder), load)


def steadiness(sizes: Sizes) -> Figures:
    """Break links and restart daemons again and again."""
    with tempfile.TemporaryDirectory() as folder:
        return check_steadiness(
            Path(folder),
            model=write_tiny_model(Path(folder)),
            devices=pair_devices(),
            num_cycles=sizes.num_cycles,
            num_restarts=sizes.num_restarts,
        )


PHASES: dict[str, Callable[[Sizes], Figures]] = {
    "handovers": handovers,
    "large": large_pool,
    "smollm2": smollm2,
    "deaths": deaths,
    "steadiness": steadiness,
}


def main() -> int:
    """Run the phases, print and write their figures, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--phases", default=",".join(PHASES), help="which of " + ", ".join(PHASES))
    parser.add_argument("--trial", action="store_true", help="little of everything")
    arguments = parser.parse_args()
    print(f"on {', '.join(pair_devices())}", flush=True)
    figures: Figures = {}
    failed: list[str] = []
    phases = arguments.phases.split(",")
    for name in phases:
        began_s = time.monotonic()
        # A process of its own gives back all that it took of the GPUs.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=context) as process:
            try:
                sizes = TRIAL if arguments.trial else Sizes()
                figures |= process.submit(PHASES[name], sizes).result()
            except Exception:
                traceback.print_exc()
                failed.append(f"{name} failed")
        print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
        if arguments.json is not None:
            gather(figures, arguments.json, program=PROGRAM, commit=arguments.commit)
    for name, value in figures.items():
        print(f"{name:36} {value:12.3f}")
    for line in (faults := [*failed, *missed(figures, phases)]):
        print(line, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
