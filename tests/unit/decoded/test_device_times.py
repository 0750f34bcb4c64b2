"""What copies and steps take a GPU: from the engine to END, the log and the metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from decoded.overlapped_turns import OverlappedTurns
from protocol import messages as wire
from shared.daemon.model_host import ModelHost
from shared.engine.block_puller import EagerPuller, PreparedCopy
from shared.engine.collected import Collected
from shared.engine.graph_decoder import GraphDecoder
from shared.kv.pool import LocalPool
from shared.ops.pool_pair import PoolPair
from tests.support.exposition import Exposition
from tests.unit.decoded.samples import CHUNK, changed
from tests.unit.decoded.world import NUM_BLOCKS, MakeTurns, World, eager_turns, ids_of
from tests.unit.shared.daemon.kit import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

Play = Callable[..., list[Any]]

MS = 1_000_000
STEP_NS, COPY_NS = 4 * MS, MS // 2
PROMPT = ids_of(20)
BLOCKS = [5, 3]


class ClockedCopy:
    """A copy that a GPU's clock was held against."""

    def __init__(self, copy: PreparedCopy) -> None:
        self._copy = copy

    def start(self, *, is_busy: bool) -> None:
        self._copy.start(is_busy=is_busy)

    def is_done(self) -> bool:
        return self._copy.is_done()

    def device_ns(self) -> int | None:
        return COPY_NS


class ClockedPuller(EagerPuller):
    """Copies as a CPU does, and tells times as a GPU does."""

    def prepare(
        self, source: Tensor, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> PreparedCopy:
        return ClockedCopy(super().prepare(source, source_ids, target_ids))


class ClockedDecoder(GraphDecoder):
    """The same of steps."""

    def collect(self) -> Collected[int]:
        return dataclasses.replace(super().collect(), device_ns=STEP_NS)


def clocked_turns(host: ModelHost, pool: LocalPool, _arena: LocalPool) -> OverlappedTurns:
    decoder = ClockedDecoder(
        host.model,
        PoolPair.of(pool.kv),
        host.layout,
        max_batch=4,
        max_context_len=NUM_BLOCKS * host.layout.block_size,
    )
    return OverlappedTurns(decoder, ClockedPuller(pool.kv), event_timeout_s=30)


@pytest.fixture
def make_turns(request: pytest.FixtureRequest) -> MakeTurns:
    """A GPU's, unless the test says otherwise."""
    chosen: MakeTurns = getattr(request, "param", clocked_turns)
    return chosen


def of(logs: list[Any], event: str) -> list[Any]:
    return [line for line in logs if line["event"] == event]


def test_a_hand_off_is_told_stage_by_stage_by_the_gpus_clocks(play: Play) -> None:
    """Two copies: a block while the prompt was computed, and the rest behind HANDOFF."""

    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        prefilld.page.publish(0, 1)
        prefilld.socket.send(changed(CHUNK, blocks=BLOCKS[:1], total_blocks=2))
        await until(lambda: world.service.metrics.snapshot()["kvpair_pulled_bytes_total"] > 0)
        user = prefilld.hand_over(PROMPT, BLOCKS, prefill_device_ns=9 * MS)
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert end.timings_ms.device == wire.DeviceTimings(
            prefill=9, pull=1, last_pull=0.5, first_step=4
        )
        values = Exposition(world.service.metrics.exposition())
        assert values["kvpair_pull_device_seconds_count"] == 2
        assert values["kvpair_pull_device_seconds_sum"] == pytest.approx(0.001)
        assert values["kvpair_decode_step_device_seconds_count"] == 5
        assert values["kvpair_decode_step_device_seconds_sum"] == pytest.approx(0.02)
        await world.settled()

    logs = play(scene)
    assert [line["device_us"] for line in of(logs, "chunk.pulled")] == [500, 500]
    (told,) = of(logs, "handoff.measured")
    assert (told["request_id"], told["lease_id"]) == ("r1", 1)
    device = {name: value for name, value in told.items() if name.startswith("device_")}
    assert device == {
        "device_prefill_us": 9_000,
        "device_pull_us": 1_000,
        "device_last_pull_us": 500,
        "device_first_step_us": 4_000,
    }


@pytest.mark.parametrize("make_turns", [eager_turns], indirect=True)
def test_on_a_cpu_the_wall_is_all_that_is_told(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        prefilld, _ = await world.linked()
        end = await prefilld.hand_over(PROMPT, BLOCKS).until_received(wire.End)
        assert isinstance(end, wire.End)
        assert end.timings_ms.device is None
        values = Exposition(world.service.metrics.exposition())
        for name in ("pull", "decode_step"):
            assert values[f"kvpair_{name}_device_seconds_count"] == 0
        await world.settled()

    logs = play(scene)
    assert [line["device_us"] for line in of(logs, "chunk.pulled")] == [None]
    (told,) = of(logs, "handoff.measured")
    stages = {name for name in told if name.endswith("_us")}
    assert stages == {"ready_us", "adopted_us", "copy_start_us", "copy_done_us", "first_step_us"}
