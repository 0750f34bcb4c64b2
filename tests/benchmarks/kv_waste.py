"""How many KV slots decoded reserves and does not use, for the lengths of public traces.

    python -m tests.benchmarks.kv_waste

The lengths go through decoded's own scheduler, request by request in the trace's order and each as
soon as there is room, without a forward pass.  The share is over all steps: of the slots in the
blocks that sequences of the batch had, those that held no token once the step was done.  Two
pools: that of an H200 with the Llama-3.1-8B shape, and one that is too small for what it lets in.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
from collections import deque
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from decoded.scheduler import Scheduler
from shared.kv.allocator import BlockAllocator
from tests.benchmarks.results_file import gather

REPOSITORY = Path(__file__).parents[2]
BLOCK_SIZE = 16
MAX_BATCH = 128
LARGE_POOL_BLOCKS = 50_000
"""800,000 tokens: 105 GB of the 8B shape in bfloat16."""
SMALL_POOL_BLOCKS = {"azure": 4_000, "mooncake": 20_000}
"""For which some sequences have to make room; any of a trace's fits."""

AZURE, MOONCAKE = "azure2023_conv_2000.csv", "mooncake_conversation_first2000.jsonl"
"""The traces' files."""

Lengths = list[tuple[int, int]]
"""(prompt tokens, answer tokens) of each request."""


@dataclass(eq=False, slots=True)
class Replayed:
    """A sequence that is nothing but lengths; see `decoded.schedulable`."""

    blocks: list[int]
    num_tokens: int
    """Computed; the first token of the answer came with the prompt and is not."""
    max_tokens: int
    """When the answer's last token is sampled."""
    adopted_ns: int
    num_in_flight: int = 0
    is_moving: bool = False

    @property
    def wants_step(self) -> bool:
        """See `Schedulable`."""
        return self.num_tokens + self.num_in_flight < self.max_tokens

    @property
    def lacks_slot(self) -> bool:
        """See `Schedulable`."""
        return self.num_tokens + self.num_in_flight >= len(self.blocks) * BLOCK_SIZE

    def extend(self, block: int) -> None:
        """See `Schedulable`."""
        self.blocks = [*self.blocks, block]

    def vacate(self) -> list[int]:
        """See `Schedulable`."""
        blocks, self.blocks = self.blocks, []
        return blocks

    def move_back(self, blocks: list[int]) -> None:
        """See `Schedulable`."""
        self.blocks = blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """What a replay found."""

    unused_pct: float
    """Of the slots reserved in all steps."""
    num_steps: int
    num_preempted: int


def replay(lengths: Lengths, num_blocks: int) -> Waste:
    """Serve all requests of a trace.

    Args:
        lengths: The requests, in order.
        num_blocks: Of decoded's pool, and at most of the arena.
    """
    scheduler: Scheduler[Replayed] = Scheduler(
        allocator=BlockAllocator(num_blocks + 1),
        arena=BlockAllocator(num_blocks + 1),
        max_batch=MAX_BATCH,
    )
    waiting, numbers = deque(lengths), count(1)
    running: set[Replayed] = set()
    used = reserved = num_steps = num_preempted = 0
    while waiting or running:
        while waiting and (sequence := _admit(scheduler, waiting[0], next(numbers))) is not None:
            waiting.popleft()
            running.add(sequence)
        batch = scheduler.next_batch()
        num_preempted += len(scheduler.take_preempted())
        for swap in scheduler.next_swaps(num_blocks):
            scheduler.swap_done(swap)
        scheduler.launched(batch)
        scheduler.collected(batch)
        num_steps += bool(batch)
        for sequence in batch:
            sequence.num_tokens += 1
            used += sequence.num_tokens
            reserved += len(sequence.blocks) * BLOCK_SIZE
            if not sequence.wants_step:
                running.remove(sequence)
                scheduler.finish(sequence)
    return Waste(
        unused_pct=(1 - used / reserved) * 100, num_steps=num_steps, num_preempted=num_preempted
    )


def _admit(
    scheduler: Scheduler[Replayed], lengths: tuple[int, int], number: int
) -> Replayed | None:
    """Start a sequence if prefilld would hand it over now."""
    num_prompt, num_answer = lengths
    num_blocks = -(-(num_prompt + 1) // BLOCK_SIZE)
    room = scheduler.room
    if room.free_sequences < 1 or room.free_blocks < num_blocks:
        return None
    blocks = scheduler.reserve(num_blocks)
    assert blocks is not None, "what was told can be taken"
    sequence = Replayed(blocks, num_prompt, num_prompt + max(1, num_answer - 1), number)
    scheduler.start(sequence)
    return sequence


def traces() -> dict[str, Lengths]:
    """Read the traces in the folder that KVPAIR_TRACES names, or beside the repository.

    Those that are not there are left out.
    """
    folder = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))
    azure, mooncake = (folder / name for name in (AZURE, MOONCAKE))
    found: dict[str, Lengths] = {}
    if azure.is_file():
        with azure.open() as file:
            found["azure"] = [
                (int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
    if mooncake.is_file():
        found["mooncake"] = [
            (int(request["input_length"]), int(request["output_length"]))
            for request in map(json.loads, mooncake.read_text().splitlines())
        ]
    return found


def main() -> None:
    """Print a line for each trace and pool, and write the figure that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    worst_pct = 0.0
    for name, lengths in traces().items():
        for num_blocks in (LARGE_POOL_BLOCKS, SMALL_POOL_BLOCKS[name]):
            waste = replay(lengths, num_blocks)
            worst_pct = max(worst_pct, waste.unused_pct)
            print(
                f"{name:9} {num_blocks:6} blocks: {waste.unused_pct:5.2f} % of the reserved slots "
                f"unused, over {waste.num_steps} steps; preemptions: {waste.num_preempted}"
            )
    if arguments.json is not None and worst_pct > 0:
        gather(
            {"kv_waste_pct": worst_pct},
            arguments.json,
            program="tests.benchmarks.kv_waste",
            commit=arguments.commit,
        )


if __name__ == "__main__":
    main()
