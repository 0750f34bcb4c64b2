"""Where the numbers of a short step go, and which steps are short."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from shared.engine.batch import SequenceStep, pack_steps
from shared.engine.padded_steps import (
    MAX_CONTEXT,
    MAX_SEQUENCES,
    MAX_TOKENS,
    Places,
    fill,
    is_short,
    num_entries_for,
    padded_batch,
    step_sizes,
)
from shared.kv.layout import KVLayout
from shared.ops.kv_write import PAD_SLOT
from shared.ops.sampling import SamplingParams

LAYOUT = KVLayout(
    num_blocks=60, num_layers=1, num_kv_heads=1, block_size=4, head_dim=8, dtype="float32"
)


def step(
    length: int, before: int = 0, *, first_block: int = 1, is_last: bool = True
) -> SequenceStep:
    return SequenceStep(
        token_ids=list(range(length)),
        start_position=before,
        block_table=list(range(first_block, first_block + 40)),
        sampling=SamplingParams() if is_last else None,
    )


def test_sizes_end_where_the_token_budget_does() -> None:
    """A larger one would never be used; a smaller last one would leave steps out."""
    assert step_sizes(10) == (16,)
    assert step_sizes(16) == (16,)
    assert step_sizes(130) == (16, 32, 64, 128, 256)
    assert step_sizes(1_000_000)[-1] == MAX_TOKENS


def test_a_run_says_of_a_step_what_the_host_knows() -> None:
    """Whatever was in it before: three prompts, of which the second goes on later."""
    places = Places(size=128, num_entries=num_entries_for(4))
    run = torch.full((places.num_numbers,), 77)
    steps = [step(70), step(3, 9, first_block=11, is_last=False), step(1, 5, first_block=21)]
    packed = pack_steps(steps, LAYOUT)
    fill(places, run, packed)
    batch = padded_batch(places, run)
    tokens = torch.stack([batch.token_ids, batch.positions, batch.slot_mapping])
    assert np.array_equal(tokens[:, :74].numpy(), packed.tokens)
    assert tokens[:, 74:].tolist() == [[0] * 54, [0] * 54, [PAD_SLOT] * 54]
    assert batch.block_table[:23].tolist() == [*range(1, 19), 11, 12, 13, 21, 22]
    # (row, rows, position, entry); those that see most come first.
    live = [tile for tile in batch.tiles.tolist() if tile[1]]
    assert live == [[64, 6, 64, 0], [70, 3, 9, 18], [73, 1, 5, 21], [0, 64, 0, 0]]
    # What pads the outputs repeats the last one.
    assert batch.output_index.tolist() == [69, *[73] * 7]
    assert batch.output_tiles[:3].tolist() == [[0, 1, 69, 0], [1, 1, 5, 21], [2, 1, 5, 21]]


def test_every_make_up_of_a_step_has_enough_tiles() -> None:
    """Each sequence may leave one that is not full."""
    places = Places(size=128, num_entries=num_entries_for(4))
    run = torch.zeros(places.num_numbers, dtype=torch.int64)
    lengths = [1] * (MAX_SEQUENCES - 2) + [61, 61]
    fill(places, run, pack_steps([step(length) for length in lengths], LAYOUT))
    tiles = padded_batch(places, run).tiles
    assert int(tiles[:, 1].sum()) == 128


def test_what_does_not_depend_on_the_size_is_in_the_same_place() -> None:
    """One graph ends the steps of all sizes."""
    run = torch.arange(10_000)
    small, large = (padded_batch(Places(size=size, num_entries=30), run) for size in (16, 256))
    for name in ("output_index", "output_tiles", "block_table"):
        assert torch.equal(getattr(small, name), getattr(large, name))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step(1_024)], True),
        ([step(1_025)], False),
        ([step(1)] * MAX_SEQUENCES, True),
        ([step(1)] * (MAX_SEQUENCES + 1), False),
        ([step(1, MAX_CONTEXT - 1)], True),
        ([step(1, MAX_CONTEXT)], False),
        ([step(1, MAX_CONTEXT - 2), step(2)], False),
        ([step(512, 3_584)], True),
        ([step(512, 3_585)], False),
    ],
)
def test_steps_are_short_by_what_there_is_to_compute(
    steps: list[SequenceStep], *, expected: bool
) -> None:
    """Tokens, sequences, what they look at, and both together."""
    assert is_short(steps, max_tokens=MAX_TOKENS) is expected
    assert not is_short([*steps[1:], dataclasses.replace(steps[0])], max_tokens=0)
