"""`decoded.overview` and `decoded.metrics`: what operators are told of sequences and steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from decoded.access import Access
from decoded.metrics import STAGES, DecodeMetrics
from decoded.overview import Overview
from decoded.sequence import HandoffTimes
from protocol import messages as wire
from shared.metrics import Metrics
from tests.support.exposition import Exposition
from tests.unit.decoded.world import World, ids_of
from tests.unit.shared.daemon.kit import until

Play = Callable[..., list[Any]]


def overview_of(world: World) -> Overview:
    return Overview(
        scheduler=world.scheduler,
        book=world.book,
        desk=world.desk,
        allocator=world.allocator,
        layout=world.host.layout,
        arena=world.arena,
        clock=world.service.clock,
    )


def test_an_adopted_sequence_is_told_with_its_progress(play: Play) -> None:
    """Adopted, its blocks still to be pulled: it waits, and the wait has an age."""

    async def scene(world: World) -> None:
        overview = overview_of(world)
        overview.declare(world.service.metrics)
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3])
        await until(lambda: world.book.living)
        world.service.clock.advance(2.0)
        values = Exposition(world.service.metrics.exposition())
        assert values['kvpair_queue_requests{queue="pulling"}'] == 1
        assert values['kvpair_queue_oldest_seconds{queue="pulling"}'] == 2.0
        assert values["kvpair_link_up"] == 1
        status: dict[str, Any] = overview.status()
        assert status["requests"]["total"] == 1
        (row,) = status["requests"]["first"]
        assert (row["id"], row["state"], row["tokens"], row["of"]) == ("r1", "pulling", 1, 6)
        assert status["sequences"] == {"running": 0, "waiting": 1, "swapped": 0}
        world.start()
        await user.until_received(wire.End)
        await world.settled()
        values = Exposition(world.service.metrics.exposition())
        assert values['kvpair_queue_requests{queue="pulling"}'] == 0
        assert values['kvpair_pool_blocks{state="free"}'] == 15
        assert values["kvpair_reserved_slots_unused_ratio"] == 0

    play(scene)


def test_slots_of_a_running_sequence_are_used_or_not(play: Play) -> None:
    """What is read in place counts on both sides; what is not written yet is the price."""

    async def scene(world: World) -> None:
        overview = overview_of(world)
        prefilld, _ = await world.linked()
        prefilld.hand_over(ids_of(20), [5, 3])
        await until(lambda: world.book.living)
        (sequence,) = world.book.living
        assert overview.slots().reserved == 0, "its blocks are its lease's still"
        sequence.settle([1], [7])
        assert (overview.slots().reserved, overview.slots().used) == (32, 20)
        status: dict[str, Any] = overview.status()
        assert status["slots"] == {"reserved": 32, "unused": 12}
        sequence.settle([], [])

    play(scene)


def test_no_slot_is_less_than_unused_while_a_prompt_goes_to_the_arena(play: Play) -> None:
    """What was read in place is there already, and its sequence's own blocks are not."""

    async def scene(world: World) -> None:
        world.access = Access("direct", "the test says so")
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(40), [5, 3, 2], max_tokens=150, total_blocks=3)
        await user.until_received(wire.Tokens)
        (sequence,) = world.book.living
        places = world.scheduler.move_out(sequence, len(sequence.in_place))
        assert places is not None
        sequence.settle(sequence.blocks, [])
        slots = overview_of(world).slots()
        assert slots.used == slots.reserved == 16 * len(sequence.blocks) > 0
        world.scheduler.moved_out(sequence, places)
        user.socket.send(wire.Cancel())
        await user.until_received(wire.End)
        await world.settled()

    play(scene)


def test_every_token_and_stage_of_an_answer_is_counted(play: Play) -> None:
    """Six tokens: the first is prefilld's, the second has a metric of its own, four gaps follow."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        user = prefilld.hand_over(ids_of(20), [5, 3])
        await user.until_received(wire.End)
        values = Exposition(world.service.metrics.exposition())
        assert values["kvpair_generated_tokens_total"] == 5
        assert values["kvpair_decode_steps_total"] == 5
        assert values["kvpair_second_token_seconds_count"] == 1
        assert values["kvpair_itl_seconds_count"] == 4
        assert values["kvpair_batch_sequences_sum"] == 5
        assert values["kvpair_pull_bytes_per_second_count"] == 1
        stages = values.by_label("kvpair_handoff_stage_seconds_count", "stage")
        assert stages == dict.fromkeys(STAGES, 1)
        await world.settled()

    play(scene)


@pytest.mark.parametrize(
    ("copy_start_ns", "copy_done_ns", "expected_ns"),
    [
        (400, 700, [100, 200, 300, 300]),
        (50, 700, [100, 0, 500, 300]),  # it began while prefill still ran
        (50, 150, [100, 0, 0, 800]),  # and had ended by then
        (0, 0, [100, 0, 0, 800]),  # nothing was copied: blocks are read in place
    ],
)
def test_stages_of_a_hand_over_add_up_whatever_ran_beside_prefill(
    copy_start_ns: int, copy_done_ns: int, expected_ns: list[int]
) -> None:
    metrics = Metrics()
    times = HandoffTimes(100, 200, copy_start_ns, copy_done_ns, 1000)
    sequence = SimpleNamespace(times=times, state=SimpleNamespace(first_token_ns=90))
    DecodeMetrics(metrics).second_token(sequence)  # type: ignore[arg-type]
    values = Exposition(metrics.exposition()).by_label("kvpair_handoff_stage_seconds_sum", "stage")
    assert [values[stage] for stage in STAGES] == pytest.approx([ns / 1e9 for ns in expected_ns])


@pytest.mark.parametrize(("num_second", "num_gaps"), [(0, 3), (1, 2), (3, 0)])
def test_a_step_counts_a_gap_for_each_stream_that_had_one(num_second: int, num_gaps: int) -> None:
    """A stream's first step here has no gap: what it waited is the second token's time."""
    metrics = Metrics()
    DecodeMetrics(metrics).stepped(
        num_sequences=3, num_second=num_second, step_s=0.004, since_ns=5_000_000
    )
    values = Exposition(metrics.exposition())
    assert values["kvpair_itl_seconds_count"] == num_gaps
    assert values["kvpair_itl_seconds_sum"] == pytest.approx(num_gaps * 0.005)
    assert values["kvpair_decode_step_seconds_sum"] == pytest.approx(0.004)
    assert values["kvpair_generated_tokens_total"] == 3


def test_the_speed_of_a_copy_is_told_even_where_it_took_no_time() -> None:
    metrics = Metrics()
    DecodeMetrics(metrics).copied(num_bytes=1000, duration_ns=0)
    DecodeMetrics(Metrics()).copied(num_bytes=0, duration_ns=5)
    values = Exposition(metrics.exposition())
    assert values["kvpair_pulled_bytes_total"] == 1000
    assert values["kvpair_pull_bytes_per_second_count"] == 1


def test_swaps_are_timed_by_the_gpu_s_clock_where_one_copied() -> None:
    metrics = Metrics()
    counting = DecodeMetrics(metrics)
    counting.swapped(num_bytes=8, duration_ns=5_000_000, is_out=True, device_ns=4_000_000)
    counting.swapped(num_bytes=8, duration_ns=5_000_000, is_out=False)
    values = Exposition(metrics.exposition())
    device = values.by_label("kvpair_swap_device_seconds_sum", "direction")
    assert device == {"out": pytest.approx(0.004)}
