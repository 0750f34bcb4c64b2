"""What prompts take a GPU: from the engine to HANDOFF, END, the log and the metrics."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from protocol import messages as wire
from shared.engine.prefilling import EagerPrefiller
from tests.support.exposition import Exposition
from tests.unit.prefilld.test_serving import generate
from tests.unit.shared.daemon.kit import until

if TYPE_CHECKING:
    from shared.engine.collected import Collected
    from tests.unit.prefilld.test_serving import Play
    from tests.unit.prefilld.world import World

MS = 1_000_000
STEP_NS, WRITTEN_NS = 4 * MS, 3 * MS


class ClockedPrefiller(EagerPrefiller):
    """Computes as a CPU does, and tells times as a GPU does."""

    def collect(self) -> Collected[int | None]:
        return dataclasses.replace(super().collect(), device_ns=STEP_NS, written_ns=WRITTEN_NS)


def clock(world: World) -> None:
    """Let a world's engine tell times as one on a GPU does."""
    eager = world.serving.prefill._prefiller
    assert isinstance(eager, EagerPrefiller)
    world.serving.prefill._prefiller = ClockedPrefiller(eager._runner)


def test_a_prompt_s_steps_add_up_to_what_decoded_is_told(play: Play) -> None:
    """Three steps of 16 tokens at most: each chunk is a line, and their sum goes along."""

    async def scene(world: World) -> None:
        clock(world)
        world.start()
        world.open_link()
        user = world.ask(generate(40))
        await until(lambda: world.link.handed_over)
        (handoff,) = world.link.of(wire.Handoff)
        assert isinstance(handoff, wire.Handoff)
        assert handoff.request.prefill_device_ns == 3 * STEP_NS
        values = Exposition(world.service.metrics.exposition())
        assert values["kvpair_prefill_step_device_seconds_count"] == 3
        assert values["kvpair_prefill_step_device_seconds_sum"] == pytest.approx(0.012)
        assert values["kvpair_prefill_device_seconds_sum"] == pytest.approx(0.012)
        user.socket.close()

    with capture_logs() as logs:
        play(scene, prefilld__token_budget=16)
    chunks = [line for line in logs if line["event"] == "chunk.computed"]
    assert [line["num_tokens"] for line in chunks] == [16, 16, 8]
    assert {(line["device_us"], line["written_us"]) for line in chunks} == {(4_000, 3_000)}
    (sent,) = [line for line in logs if line["event"] == "handoff.sent"]
    assert sent["prefill_device_us"] == 12_000
    assert {line["request_id"] for line in chunks} == {sent["request_id"]}


def test_an_answer_that_ends_at_prefilld_tells_its_prompt_s_time(play: Play) -> None:
    async def scene(world: World) -> None:
        clock(world)
        world.start()
        world.open_link()
        end = await world.ask(generate(40, max_tokens=1)).end()
        assert end.timings_ms.device == wire.DeviceTimings(prefill=4)

    play(scene)


def test_on_a_cpu_nothing_is_told_of_a_gpu(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        await world.ask(generate(40, max_tokens=1)).end()
        world.ask(generate(40))
        await until(lambda: world.link.handed_over)
        (handoff,) = world.link.of(wire.Handoff)
        assert isinstance(handoff, wire.Handoff)
        assert handoff.request.prefill_device_ns is None
        values = Exposition(world.service.metrics.exposition())
        for name in ("prefill_step_device", "prefill_device"):
            assert values[f"kvpair_{name}_seconds_count"] == 0

    play(scene)
