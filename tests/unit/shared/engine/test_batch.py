"""Packing a step: every token's place, and refusal of what would hit somebody else's blocks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shared.engine.batch import SequenceStep, build_batch
from shared.kv.layout import KVLayout
from shared.ops.sampling import SamplingParams

LAYOUT = KVLayout(
    num_blocks=10, num_layers=1, num_kv_heads=1, block_size=4, head_dim=2, dtype="float32"
)
CPU = torch.device("cpu")
STEP = SequenceStep(token_ids=[11, 12, 13], start_position=2, block_table=[7, 3, 9], sampling=None)


def test_tokens_positions_and_slots_line_up() -> None:
    """A chunk that crosses a block's border, and a decoded token with room to spare."""
    decode = SequenceStep(
        token_ids=[5], start_position=8, block_table=[1, 2, 4], sampling=SamplingParams()
    )
    batch = build_batch([STEP, decode], LAYOUT, CPU)
    assert batch.token_ids.tolist() == [11, 12, 13, 5]
    assert batch.positions.tolist() == [2, 3, 4, 8]
    assert batch.slot_mapping.tolist() == [7 * 4 + 2, 7 * 4 + 3, 3 * 4, 4 * 4]
    rows = [(s.query_start, s.query_len, s.context_len) for s in batch.spans]
    assert rows == [(0, 3, 5), (3, 1, 9)]
    assert [s.block_table.tolist() for s in batch.spans] == [[7, 3], [1, 2, 4]]


def test_slots_beyond_32_bits_keep_their_value() -> None:
    """Everything that becomes an offset is int64."""
    huge = LAYOUT.with_num_blocks((1 << 31) - 1)
    step = dataclasses.replace(STEP, block_table=[(1 << 31) - 2] * 2)
    assert build_batch([step], huge, CPU).slot_mapping[0] == ((1 << 31) - 2) * 4 + 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": []}, "sequence 1 of the step has no tokens"),
        ({"start_position": -1}, "sequence 1 of the step starts at -1"),
        ({"block_table": [7]}, "has 1 blocks; 5 tokens need 2"),
        ({"block_table": [7, 0]}, "names a block outside 1 to 9"),
        ({"block_table": [7, 10]}, "names a block outside 1 to 9"),
    ],
)
def test_a_sequence_that_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    """Before anything is computed: a wrong block would corrupt another request."""
    with pytest.raises(ValueError, match=message):
        build_batch([STEP, dataclasses.replace(STEP, **changes)], LAYOUT, CPU)  # type: ignore[arg-type]


def test_an_empty_step_is_refused() -> None:
    """There is nothing to run."""
    with pytest.raises(ValueError, match="at least one sequence"):
        build_batch([], LAYOUT, CPU)


def test_leading_blocks_may_be_the_peer_s() -> None:
    """They are named `~block`; what is written goes to our own."""
    peer = torch.zeros(50, 1)
    step = SequenceStep(token_ids=[5], start_position=8, block_table=[~40, ~2, 7], sampling=None)
    batch = build_batch([step], LAYOUT, CPU, peer=peer)
    (span,) = batch.spans
    assert (span.block_table.tolist(), span.num_in_place) == ([40, 2, 7], 2)
    assert batch.slot_mapping.tolist() == [7 * LAYOUT.block_size]
    assert batch.peer is peer


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([~40, ~2, ~7], "would write to the peer's pool"),
        ([~50, ~2, 7], "a block of the peer's outside 1 to 49"),
        ([~0, ~2, 7], "a block of the peer's outside 1 to 49"),
        ([~40, ~2, 0], "a block outside 1 to"),
        ([~40, 2, ~7], "a block outside 1 to"),
    ],
)
def test_blocks_of_the_peer_s_that_cannot_be_are_refused(table: list[int], says: str) -> None:
    step = SequenceStep(token_ids=[5], start_position=8, block_table=table, sampling=None)
    with pytest.raises(ValueError, match=says):
        build_batch([step], LAYOUT, CPU, peer=torch.zeros(50, 1))


def test_hidden_states_are_wanted_where_a_token_is_sampled() -> None:
    """The last layer is computed for no others; who asks for all gets all."""
    decode = SequenceStep(
        token_ids=[5], start_position=8, block_table=[1, 2, 4], sampling=SamplingParams()
    )

    def rows_of(*steps: SequenceStep) -> list[int]:
        batch = build_batch(steps, LAYOUT, CPU)
        assert batch.output_rows is not None
        assert batch.output_index is not None
        assert batch.output_index.tolist() == list(batch.output_rows)
        return list(batch.output_rows)

    assert rows_of(STEP, decode, STEP) == [3]
    assert rows_of(STEP) == []
    assert build_batch([STEP, decode], LAYOUT, CPU, all_outputs=True).output_rows is None
