"""decoded put together, in this process: how it comes up, who may knock, how it ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from decoded.app import Decoded
from protocol import messages as wire
from protocol.codec import validate
from protocol.errors import NoSuchSocketError
from protocol.states import Role
from protocol.unix import connect_unix
from shared.daemon.listening import open_listener
from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from tests.unit.decoded.world import Prefilld, ids_of
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import (
    RecordingService,
    failure_of_contradicting_books,
    owned,
    run,
    turns,
    until,
)

Scene = Callable[["App"], Coroutine[Any, Any, None]]
Play = Callable[..., list[Any]]


class App:
    """A daemon, and those who knock at its socket."""

    def __init__(self, service: RecordingService, host: ModelHost) -> None:
        self.service, self._host = service, host
        self.daemon = Decoded(
            service, EngineThread(num_threads=1), open_listener(service.socket_path, environ={})
        )
        self.serving: asyncio.Task[None] | None = None
        self.prefillds: list[Prefilld] = []

    async def loaded(self) -> None:
        self.serving = asyncio.ensure_future(self.daemon.serve())
        await until(lambda: self.service.state == "waiting-for-peer")

    def ask(self, message: wire.Message) -> Recorder:
        client = Recorder(owned(connect_unix(self.service.socket_path)), Role.CLIENT)
        client.start()
        client.socket.send(message)
        return client

    async def status(self) -> dict[str, Any]:
        reply = await self.ask(wire.StatusRequest()).until_received(wire.Status)
        assert isinstance(reply, wire.Status)
        validate(reply)
        return reply.status

    def knock(self) -> Prefilld:
        prefilld = Prefilld(owned(connect_unix(self.service.socket_path)), self._host)
        prefilld.start()
        self.prefillds.append(prefilld)
        return prefilld

    async def linked(self) -> Prefilld:
        prefilld = self.knock()
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        prefilld.map()
        await prefilld.until_received(wire.Mapped)
        return prefilld

    async def end(self) -> None:
        self.daemon.close()
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        await self.service.end()
        await self.daemon._engine.stop()
        if self.daemon._parts is not None:
            for session in self.daemon._parts.desk.links.sessions:
                if session.is_mapped:
                    session.peer_pool.close()
        for prefilld in self.prefillds:
            prefilld.socket.close()
            prefilld.page.close()


@pytest.fixture
def play(
    make_service: Callable[..., RecordingService],
    model_file: Path,
    host: ModelHost,
    monkeypatch: pytest.MonkeyPatch,
) -> Play:
    """Run a scene with a daemon over the tiny model."""
    monkeypatch.setattr("decoded.app.SWEEP_S", 0.002)

    def play_scene(scene: Scene, **settings: object) -> list[Any]:
        service = make_service(model__path=model_file, decoded__num_blocks=16, **settings)

        async def whole() -> None:
            app = App(service, host)
            try:
                await scene(app)
            finally:
                await app.end()

        with capture_logs() as logs:
            run(whole())
        return logs

    return play_scene


async def refusal(prefilld: Prefilld) -> wire.Refuse:
    refuse = await prefilld.until_received(wire.Refuse)
    assert isinstance(refuse, wire.Refuse)
    return refuse


def test_status_and_metrics_are_answered_while_the_model_loads(play: Play) -> None:
    async def scene(app: App) -> None:
        assert (await app.status())["state"] == "loading"
        metrics = await app.ask(wire.MetricsRequest()).until_received(wire.Metrics)
        assert isinstance(metrics, wire.Metrics)
        assert "kvpair_handoffs_adopted_total" in metrics.text

    play(scene)


@pytest.mark.parametrize(
    ("swap_gib", "num_blocks", "is_missed"), [(4.0, 15, False), (0.0, 0, False), (1e-9, 0, True)]
)
def test_an_arena_is_as_large_as_the_pool_and_missed_only_where_one_was_asked_for(
    play: Play, swap_gib: float, num_blocks: int, *, is_missed: bool
) -> None:
    """Whoever wrote 0 knows; whoever got less than a block does not."""

    async def scene(app: App) -> None:
        await app.loaded()
        swap = (await app.status())["swap"]
        assert swap == {"blocks": num_blocks, "used": 0, "oldest_s": 0.0}

    logs = play(scene, decoded__swap_gib=swap_gib)
    assert ("arena.missing" in [line["event"] for line in logs]) == is_missed


def test_status_has_the_same_parts_before_the_model_is_there(play: Play) -> None:
    """Whoever reads one of them meets nothing instead of a missing key."""

    async def scene(app: App) -> None:
        while_loading = set(await app.status())
        await app.loaded()
        assert while_loading == set(await app.status())

    play(scene)


def test_status_tells_pool_sequences_and_link(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        status = await app.status()
        assert status["pool"]["free"] == 15
        assert status["sequences"] == {"running": 0, "waiting": 0, "swapped": 0}
        assert (status["link"], status["epoch"]) == ({"state": "waiting"}, None)
        prefilld = await app.linked()
        await until(lambda: app.service.state == "serving")
        status = await app.status()
        assert status["link"]["state"] == "open"
        assert status["epoch"] == bytes(range(16)).hex()
        prefilld.socket.close()
        await until(lambda: app.service.state == "waiting-for-peer")

    play(scene)


def test_a_hello_that_came_early_is_welcomed_once_the_model_is_there(play: Play) -> None:
    """There is nothing to judge it by before."""

    async def scene(app: App) -> None:
        prefilld = app.knock()
        prefilld.hello()
        await turns()
        assert prefilld.messages == []
        await app.loaded()
        await prefilld.until_received(wire.Welcome)

    play(scene)


def test_a_prefilld_that_gave_up_while_the_model_loaded_does_not_hold_the_link(play: Play) -> None:
    """Loading may take longer than a hand-shake may; prefilld then knocks again."""

    async def scene(app: App) -> None:
        impatient = app.knock()
        impatient.hello()
        await until(lambda: app.daemon._visitors)
        await turns()
        impatient.socket.close()
        await until(lambda: not app.daemon._visitors)
        await app.loaded()
        again = app.knock()
        again.hello()
        await again.until(lambda: again.messages)
        assert again.kinds == [wire.Welcome]

    play(scene)


def test_a_second_prefilld_is_told_who_has_the_link(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        await app.linked()
        second = app.knock()
        second.hello()
        refuse = await refusal(second)
        assert refuse.code == "link-busy"
        assert f"prefilld {os.getpid()} has the link" in refuse.message
        await second.until(lambda: second.closed)

    play(scene)


def test_a_lost_link_makes_room_for_the_next(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        first = await app.linked()
        first.socket.close()
        await app.linked()

    play(scene)


def test_a_new_link_is_told_what_is_still_held_of_its_epoch(play: Play) -> None:
    """Prefilld keeps those blocks in quarantine until they are released."""

    async def scene(app: App) -> None:
        await app.loaded()
        first = await app.linked()
        app.daemon._parts.desk.next_copies = lambda _: []  # type: ignore[union-attr, method-assign]
        user = first.hand_over(ids_of(5), [1])
        await first.until_received(wire.Adopt)
        first.socket.close()
        await until(lambda: app.daemon._parts.desk.links.sessions[0].is_lost)  # type: ignore[union-attr]
        second = app.knock()
        second.hello()
        welcome = await second.until_received(wire.Welcome)
        assert isinstance(welcome, wire.Welcome)
        assert welcome.held == [1]
        other = app.knock()
        second.socket.close()
        await until(lambda: len(app.daemon._visitors) == 1)
        other.hello(epoch=bytes(16))
        welcome = await other.until_received(wire.Welcome)
        assert isinstance(welcome, wire.Welcome)
        assert welcome.held == [], "leases of another epoch mean nothing to it"
        user.socket.close()

    play(scene)


def test_a_prefilld_of_another_version_is_refused_and_the_daemon_lives_on(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        prefilld = app.knock()
        prefilld.hello(version=99)
        assert (await refusal(prefilld)).code == "version"
        prefilld = app.knock()
        prefilld.hello(fields={})
        assert (await refusal(prefilld)).code == "fingerprint"
        counters = (await app.status())["counters"]
        assert counters['kvpair_links_refused_total{code="version"}'] == 1
        await app.linked()

    play(scene)


def test_the_configured_user_may_open_the_link_beside_root_and_our_own(play: Play) -> None:
    async def scene(app: App) -> None:
        assert app.daemon._allowed_uids() == {0, os.geteuid(), 12_345}

    play(scene, decoded__link_uid=12_345)


def test_a_visitor_that_asks_nothing_is_cut_off(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        silent = Recorder(owned(connect_unix(app.service.socket_path)), Role.CLIENT).start()
        await until(lambda: app.daemon._visitors)
        app.service.clock.advance(60)
        await silent.until(lambda: silent.closed)

    play(scene)


def test_a_broken_visitor_is_counted_and_harms_nobody(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        client = Recorder(owned(connect_unix(app.service.socket_path)), Role.CLIENT).start()
        client.raw.send(b"\x00\x00\x00\x01\xc0")
        await client.until_received(wire.Error)
        counters = (await app.status())["counters"]
        assert counters['kvpair_protocol_errors_total{code="malformed-frame"}'] == 1

    play(scene)


def test_a_daemon_that_drains_says_so_and_finishes_what_it_adopted(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        prefilld = await app.linked()
        assert app.daemon._parts is not None
        desk = app.daemon._parts.desk
        copies, desk.next_copies = desk.next_copies, lambda _: []  # type: ignore[method-assign]
        user = prefilld.hand_over(ids_of(5), [1], max_tokens=27)
        await prefilld.until_received(wire.Adopt)
        app.service.drain(reason="test")
        await prefilld.until_received(wire.Drain)
        await turns(200)
        assert app.serving is not None
        assert not app.serving.done(), "an answer is not finished"
        desk.next_copies = copies  # type: ignore[method-assign]
        prefilld.socket.send(wire.Abort(epoch=bytes(range(16)), lease=1))  # ignored, but wakes
        end = await user.until_received(wire.End)
        assert isinstance(end, wire.End)
        assert end.usage.completion_tokens == 27
        await app.serving

    play(scene)


def test_a_daemon_that_drains_waits_for_what_it_has_reserved_room_for(play: Play) -> None:
    """Else a prompt in prefill would wait for a decoded that has left."""

    async def scene(app: App) -> None:
        await app.loaded()
        prefilld = await app.linked()
        prefilld.socket.send(
            wire.Chunk(
                epoch=bytes(range(16)),
                lease=1,
                slot=0,
                generation=1,
                first=0,
                blocks=[1],
                total_blocks=3,
            )
        )
        assert app.daemon._parts is not None
        desk = app.daemon._parts.desk
        await until(lambda: desk.links.has_reservations)
        app.service.drain(reason="test")
        await prefilld.until_received(wire.Drain)
        await turns(200)
        assert app.serving is not None
        assert not app.serving.done()
        prefilld.socket.send(wire.Abort(epoch=bytes(range(16)), lease=1))
        await prefilld.until_received(wire.Release)
        await app.serving

    play(scene)


def test_a_link_that_opens_in_a_drain_is_told_of_it_too(play: Play) -> None:
    """Otherwise requests go on coming to a daemon that waits for them to end."""

    async def scene(app: App) -> None:
        await app.loaded()
        first = await app.linked()
        first.hand_over(ids_of(5), [1])
        await first.until_received(wire.Adopt)
        app.daemon._parts.desk.next_copies = lambda _: []  # type: ignore[union-attr, method-assign]
        first.hand_over(ids_of(5), [2], lease=2, at=1)  # it keeps the daemon
        await until(lambda: len(first.of(wire.Adopt)) == 2)
        first.socket.close()
        app.service.drain(reason="test")
        second = app.knock()
        second.hello()
        await second.until(lambda: second.messages)
        if isinstance(second.messages[0], wire.Refuse):
            return
        second.map()
        await second.until_received(wire.Mapped)
        await turns(500)
        assert wire.Drain in second.kinds

    play(scene)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_daemon_that_ends_tells_its_clients_and_prefilld(play: Play, *, is_told: bool) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        prefilld = await app.linked()
        app.daemon._parts.desk.next_copies = lambda _: []  # type: ignore[union-attr, method-assign]
        user = prefilld.hand_over(ids_of(5), [1])
        await prefilld.until_received(wire.Adopt)
        if is_told:
            app.service.drain(reason="test")
        app.daemon.close()
        error = await user.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert (error.code, error.retryable) == ("draining" if is_told else "internal", True)
        await prefilld.until_received(wire.Bye)
        with pytest.raises(NoSuchSocketError, match="no socket"):
            app.knock()

    play(scene)


def test_books_that_contradict_each_other_end_an_idle_daemon(play: Play) -> None:
    """Whatever broke them, the next answer might be somebody else's."""

    async def scene(app: App) -> None:
        await app.loaded()
        assert app.daemon._parts is not None
        failure = await failure_of_contradicting_books(app.service, app.daemon._parts.allocator)
        assert "the books say" in str(failure)

    play(scene)
