"""What a captured step reads: every row's own numbers, and none for the rows beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.engine.decode_inputs import DecodeInputs
from shared.engine.decode_rows import RowPlan
from shared.engine.decoding import DecodeStep
from shared.kv.layout import KVLayout
from shared.model.batch import DecodeBatch
from shared.ops.kv_write import PAD_SLOT
from shared.ops.sampling import SamplingParams

BLOCK_SIZE = 4
SAMPLED = torch.tensor([70, 71, 72])


@pytest.fixture
def inputs() -> DecodeInputs:
    layout = KVLayout(
        num_blocks=30,
        num_layers=1,
        num_kv_heads=1,
        block_size=BLOCK_SIZE,
        head_dim=8,
        dtype="float32",
    )
    return DecodeInputs(layout, max_batch=3, max_context_len=24, device=torch.device("cpu"))


def step(**changes: Any) -> DecodeStep:  # noqa: ANN401 - fields of any type
    fields = {"key": "a", "token_id": 5, "position": 6, "block_table": [3, 1, 8, 12]}
    return DecodeStep(**fields | changes, sampling=SamplingParams())  # type: ignore[arg-type]


def batch_of(inputs: DecodeInputs, steps: list[DecodeStep], plan: RowPlan) -> DecodeBatch:
    staging = torch.full(inputs.shape, 99)
    inputs.hold_tables(steps, plan.rows)
    inputs.fill(staging, steps, plan)
    inputs.upload(staging)
    return inputs.batch(3, SAMPLED)


def test_each_row_has_its_sequences_numbers_and_the_rest_pad(inputs: DecodeInputs) -> None:
    """Whatever an earlier step left in the staging: a row that pads must not touch a block."""
    steps = [step(), step(key="b", position=5, block_table=[~7, 9], token_id=6)]
    batch = batch_of(inputs, steps, RowPlan(rows=[2, 0], previous_rows=[None, None]))
    assert batch.token_ids.tolist() == [6, 0, 5]
    assert batch.positions.tolist() == [5, 0, 6]
    assert batch.slot_mapping.tolist() == [9 * BLOCK_SIZE + 1, PAD_SLOT, BLOCK_SIZE + 2]
    assert batch.context_lens.tolist() == [6, 0, 7]
    assert batch.block_tables[2, :4].tolist() == [3, 1, 8, 12]
    assert batch.block_tables[0, :2].tolist() == [~7, 9]


def test_a_token_that_the_host_never_saw_comes_from_the_row_that_sampled_it(
    inputs: DecodeInputs,
) -> None:
    plan = RowPlan(rows=[0], previous_rows=[2])
    batch = batch_of(inputs, [step(token_id=None)], plan)
    assert batch.token_ids.tolist()[0] == SAMPLED[2]


def test_a_table_that_grew_or_was_replaced_is_what_the_row_holds(inputs: DecodeInputs) -> None:
    """Only what a table gained is uploaded; one that begins otherwise is uploaded whole."""
    plan = RowPlan(rows=[0], previous_rows=[None])
    for table in ([3, 1], [3, 1, 8], [4, 1, 8, 2], [9, 5]):
        batch = batch_of(inputs, [step(block_table=table)], plan)
        assert batch.block_tables[0, : len(table)].tolist() == table


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"position": 16}, "4 blocks does not reach position 16"),
        ({"block_table": [3, ~1]}, "would go to block -2"),
        ({"block_table": [3, 0]}, "would go to block 0"),
        ({"block_table": [3, 30]}, "would go to block 30"),
        ({"block_table": list(range(1, 9))}, "8 blocks does not fit 6"),
        ({"token_id": None}, "is not known"),
    ],
)
def test_a_step_that_would_write_elsewhere_is_refused(
    inputs: DecodeInputs, changes: dict[str, Any], says: str
) -> None:
    """A graph does not look where it writes: a wrong slot is somebody else's block."""
    with pytest.raises(ValueError, match=says):
        batch_of(inputs, [step(**changes)], RowPlan(rows=[0], previous_rows=[None]))
