"""How many KV slots decoded reserves and does not use, for the lengths of public traces.

    python -m tests.benchmarks.kv_waste

A sequence has blocks for prompt and whole answer from its adoption on, so what is not generated yet
is reserved and unused; half a block at its end always is.  Shares are over all steps of a trace.
"""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
BLOCK_SIZE = 16

Lengths = list[tuple[int, int]]
"""(prompt tokens, answer tokens) of each request."""


def waste_pct(lengths: Lengths) -> float:
    """Return the share of reserved slots that are unused, in percent, over every decode step."""
    used = reserved = 0
    for num_prompt, num_answer in lengths:
        num_slots = -(-(num_prompt + num_answer) // BLOCK_SIZE) * BLOCK_SIZE
        reserved += num_answer * num_slots
        used += num_answer * num_prompt + num_answer * (num_answer + 1) // 2
    return (1 - used / reserved) * 100


def last_block_pct(lengths: Lengths) -> float:
    """Return the same if only blocks that hold something were reserved."""
    used = reserved = 0
    for num_prompt, num_answer in lengths:
        for num_tokens in range(num_prompt + 1, num_prompt + num_answer + 1):
            used += num_tokens
            reserved += -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE
    return (1 - used / reserved) * 100


def traces() -> dict[str, Lengths]:
    """Read the traces in the folder that KVPAIR_TRACES names, or beside the repository."""
    folder = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))
    with (folder / "azure2023_conv_2000.csv").open() as file:
        azure = [
            (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    lines = (folder / "mooncake_conversation_first2000.jsonl").read_text().splitlines()
    mooncake = [
        (int(request["input_length"]), int(request["output_length"]))
        for request in map(json.loads, lines)
    ]
    return {"azure": azure, "mooncake": mooncake}


def main() -> None:
    """Print a line for each trace."""
    for name, lengths in traces().items():
        print(
            f"{name:9} whole answers reserved: {waste_pct(lengths):5.2f} %   "
            f"blocks as they are needed: {last_block_pct(lengths):5.2f} %"
        )


if __name__ == "__main__":
    main()
