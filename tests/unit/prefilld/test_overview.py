"""`prefilld.overview` and `prefilld.metrics`: what operators are told of requests and steps."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from prefilld.metrics import PrefillMetrics
from protocol import messages as wire
from shared.daemon.gauges import Queue
from shared.metrics import Metrics
from tests.support.exposition import Exposition
from tests.unit.prefilld.test_serving import generate
from tests.unit.shared.daemon.kit import until

if TYPE_CHECKING:
    from tests.unit.prefilld.test_serving import Play
    from tests.unit.prefilld.world import World


def test_each_queue_has_a_length_and_an_age(play: Play) -> None:
    """A request is in exactly one of them, from its arrival until decoded has it."""

    async def scene(world: World) -> None:
        world.overview.declare(world.service.metrics)
        user = world.ask(generate(20))
        await user.until_received(wire.Accepted)
        world.service.clock.advance(3.0)
        values = Exposition(world.service.metrics.exposition())
        lengths = values.by_label("kvpair_queue_requests", "queue")
        assert lengths == {"judged": 0, "waiting": 1, "running": 0, "ready": 0, "sent": 0}
        assert values['kvpair_queue_oldest_seconds{queue="waiting"}'] == 3.0
        world.start()
        await until(lambda: world.desk.num_ready)
        world.service.clock.advance(1.5)
        values = Exposition(world.service.metrics.exposition())
        lengths = values.by_label("kvpair_queue_requests", "queue")
        assert lengths == {"judged": 0, "waiting": 0, "running": 0, "ready": 1, "sent": 0}
        assert values['kvpair_queue_oldest_seconds{queue="ready"}'] == 1.5
        assert values['kvpair_reserved_slots{use="used"}'] == 20
        assert values['kvpair_reserved_slots{use="unused"}'] == 12
        user.socket.send(wire.Cancel())
        await user.end()

    play(scene)


def test_a_request_that_is_being_judged_is_in_a_queue(play: Play) -> None:
    """A long prompt takes long to tokenise, and its client waits as well."""

    async def scene(world: World) -> None:
        gate = threading.Event()
        world.reception._admission.is_quick = lambda _: False  # type: ignore[method-assign]
        world.reception._judges.submit(gate.wait)  # a long prompt has the thread
        user = world.ask(generate(20))
        await until(lambda: world.reception.judging_since_s)
        world.service.clock.advance(0.5)
        assert world.overview.queues()["judged"] == Queue(length=1, oldest_s=0.5)
        gate.set()
        await user.until_received(wire.Accepted)
        assert world.overview.queues()["judged"].length == 0

    play(scene)


def test_requests_are_told_with_their_progress(play: Play) -> None:
    async def scene(world: World) -> None:
        user = world.ask(generate(20))
        accepted = await user.until_received(wire.Accepted)
        assert isinstance(accepted, wire.Accepted)
        world.service.clock.advance(0.25)
        requests: Any = world.overview.status()["requests"]
        assert requests == {
            "total": 1,
            "first": [
                {
                    "id": accepted.id,
                    "state": "waiting",
                    "tokens": 0,
                    "of": 20,
                    "cached": 0,
                    "age_s": 0.25,
                }
            ],
        }

    play(scene)


def test_a_first_token_counts_its_waits_once(play: Play) -> None:
    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        await world.ask(generate(20, max_tokens=1)).end()
        values = Exposition(world.service.metrics.exposition())
        for name in ("ttft", "queue", "prefill", "prefill_step"):
            assert values[f"kvpair_{name}_seconds_count"] == 1
        assert values["kvpair_prefill_step_tokens_sum"] == 20
        assert values["kvpair_prompt_tokens_total"] == 20

    play(scene)


def test_a_link_to_another_process_is_a_restart() -> None:
    """The same decoded that comes back after a lost link is none."""
    metrics = Metrics()
    counting = PrefillMetrics(metrics)
    instance = wire.Instance(boot_id="b", pid=1, start_time=2, pid_namespace=3, shm_device=4)
    credits = wire.Credits(free_blocks=1, free_sequences=1, queue_depth=0, seen=0)
    first = wire.Welcome(instance=instance, access="pull", held=[], pool_blocks=1, credits=credits)
    counting.link_opened(before=None, now=first)
    counting.link_opened(before=first, now=first)
    assert metrics.snapshot()["kvpair_peer_restarts_total"] == 0
    successor = wire.Welcome(
        instance=wire.Instance(boot_id="b", pid=9, start_time=8, pid_namespace=3, shm_device=4),
        access="pull",
        held=[],
        pool_blocks=1,
        credits=credits,
    )
    counting.link_opened(before=first, now=successor)
    assert metrics.snapshot()["kvpair_peer_restarts_total"] == 1
    assert metrics.snapshot()["kvpair_links_opened_total"] == 3


@pytest.mark.parametrize("resumed", [[], [5]])
def test_a_resumed_answer_has_no_first_token(play: Play, resumed: list[int]) -> None:
    """It was counted when it was first asked for; its next token is no first one."""

    async def scene(world: World) -> None:
        world.start()
        world.open_link()
        user = world.ask(generate(20, max_tokens=4))
        accepted = await user.until_received(wire.Accepted)
        assert isinstance(accepted, wire.Accepted)
        if resumed:
            message = wire.Resume(
                attempt=1, seed=accepted.seed, fingerprint=accepted.fingerprint, ids=resumed
            )
            await world.ask(generate(20, max_tokens=4, resume=message)).until_received(wire.Tokens)
        await until(lambda: len(world.link.handed_over) == 1 + len(resumed))
        values = Exposition(world.service.metrics.exposition())
        assert values["kvpair_ttft_seconds_count"] == 1
        assert values["kvpair_prefill_seconds_count"] == 1 + len(resumed)

    play(scene)
