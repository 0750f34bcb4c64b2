"""prefilld put together, in this process: how it comes up, what it answers, how it ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from decoded.mapping import PeerPool
from prefilld.app import Prefilld
from protocol import messages as wire
from protocol.acceptor import Acceptor
from protocol.codec import validate
from protocol.descriptors import close_all
from protocol.listener import inherit_unix, listen_unix
from protocol.states import Role
from protocol.unix import connect_unix
from shared.daemon.devices import CPU_DEVICE
from shared.daemon.instance import this_instance
from shared.daemon.listening import open_listener
from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from tests.unit.prefilld.recorders import Link
from tests.unit.prefilld.world import User
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
Play = Callable[..., None]


class App:
    """A daemon, and users that knock at its socket."""

    def __init__(self, service: RecordingService, passed: socket.socket | None = None) -> None:
        self.service = service
        if passed is None:
            listener = open_listener(service.socket_path, environ={})
        else:  # as a service manager does
            passed.bind(str(service.socket_path))
            service.socket_path.chmod(0o660)
            passed.listen()
            listener = inherit_unix(passed.dup(), service.socket_path)
        self.daemon = Prefilld(service, EngineThread(num_threads=1), listener)
        self.serving: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        self.serving = asyncio.ensure_future(self.daemon.serve())
        return self.serving

    async def loaded(self) -> None:
        self.start()
        await until(lambda: self.service.state == "waiting-for-peer")

    def knock(self) -> User:
        user = User(owned(connect_unix(self.service.socket_path)), Role.CLIENT)
        user.start()
        return user

    def ask(self, message: wire.Message) -> User:
        user = self.knock()
        user.socket.send(message)
        return user

    async def status(self) -> dict[str, Any]:
        reply = await self.ask(wire.StatusRequest()).until_received(wire.Status)
        assert isinstance(reply, wire.Status)
        return reply.status

    async def end(self) -> None:
        self.daemon.close()
        if self.serving is not None:
            self.serving.cancel()
            await asyncio.gather(self.serving, return_exceptions=True)
        await self.service.end()
        await self.daemon._engine.stop()


@pytest.fixture
def play(
    make_service: Callable[..., RecordingService], model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Play:
    """Run a scene with a daemon over the tiny model."""
    monkeypatch.setattr("prefilld.app.SWEEP_S", 0.002)

    def play_scene(
        scene: Scene, *, passed: socket.socket | None = None, **settings: object
    ) -> None:
        service = make_service(model__path=model_file, pool__num_blocks=16, **settings)

        async def whole() -> None:
            app = App(service, passed)
            try:
                await scene(app)
            finally:
                await app.end()

        with capture_logs():
            run(whole())

    return play_scene


def generate(**options: Any) -> wire.Generate:  # noqa: ANN401 - GENERATE's fields
    return wire.Generate(prompt=[5, 6, 7], ignore_eos=True, **options)


@asynccontextmanager
async def adopting_decoded(app: App, host: ModelHost) -> AsyncIterator[list[wire.Handoff]]:
    """A decoded that adopts whatever comes, and drops it at once."""
    listener = listen_unix(app.service.config.decoded.socket)
    handoffs: list[wire.Handoff] = []
    ends: list[Recorder] = []

    def credits() -> wire.Credits:
        return wire.Credits(free_blocks=99, free_sequences=99, queue_depth=0, seen=len(handoffs))

    def on_connection(sock: Any) -> None:  # noqa: ANN401 - a socket
        end = Recorder(owned(sock), Role.DECODED_CLIENT)
        ends.append(end)

        def react(message: wire.Message) -> None:
            fds = end.fds[-1] or []
            if isinstance(message, wire.Hello):
                end.socket.send(
                    wire.Welcome(
                        instance=this_instance(),
                        access="pull",
                        held=[],
                        pool_blocks=99,
                        credits=credits(),
                    )
                )
            elif isinstance(message, wire.Map):
                pool = PeerPool(message, fds, host.layout, CPU_DEVICE)
                end.socket.send(
                    wire.Mapped(digest=pool.digest, bandwidth_gb_s=1, credits=credits())
                )
                assert pool.close()
            elif isinstance(message, wire.Handoff):
                handoffs.append(message)
                for kind in (wire.Adopt, wire.Release):
                    end.socket.send(
                        kind(epoch=message.epoch, lease=message.lease, credits=credits())
                    )
            close_all(fds)

        end.react = react
        end.start()

    acceptor = Acceptor(listener.socket, on_connection, loop=asyncio.get_running_loop())
    try:
        yield handoffs
    finally:
        acceptor.stop()
        listener.close()
        for end in ends:
            end.socket.close()


def test_status_and_metrics_are_answered_while_the_model_loads(play: Play) -> None:
    """A user who waits wants to know what for."""

    async def scene(app: App) -> None:
        status = await app.status()
        assert status["state"] == "loading"
        assert status["pool"] is None
        metrics = await app.ask(wire.MetricsRequest()).until_received(wire.Metrics)
        assert isinstance(metrics, wire.Metrics)
        assert "kvpair_requests_accepted_total" in metrics.text

    play(scene)


def test_a_request_that_came_early_is_answered_once_the_model_is_there(play: Play) -> None:
    async def scene(app: App) -> None:
        user = app.ask(generate(max_tokens=1))
        await turns()
        assert user.messages == []
        await app.loaded()
        end = await user.end()
        assert user.kinds == [wire.Accepted, wire.Tokens, wire.End]
        assert end.reason == "length"

    play(scene)


def test_status_has_the_same_parts_before_the_model_is_there(play: Play) -> None:
    """Whoever reads one of them meets nothing instead of a missing key."""

    async def scene(app: App) -> None:
        while_loading = set(await app.status())
        await app.loaded()
        assert while_loading == set(await app.status())

    play(scene)


def test_status_tells_pool_queue_and_link(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        status = await app.status()
        validate(wire.Status(status=status))
        assert (status["state"], status["device"]) == ("waiting-for-peer", "cpu")
        assert len(bytes.fromhex(status["epoch"])) == 16
        pool = status["pool"]
        assert (pool["total"], pool["free"], pool["reserved"]) == (16, 15, 1)
        assert status["queue"]["waiting"] == 0
        assert status["link"]["state"] in ("connecting", "handshake")

    play(scene)


def test_a_check_is_judged_by_both_pools(play: Play) -> None:
    """Decoded's size is that of the configuration until it has told its own."""

    async def scene(app: App) -> None:
        await app.loaded()
        user = app.ask(wire.Check(prompt=[1], max_tokens=100))
        checked = await user.until_received(wire.Checked)
        assert isinstance(checked, wire.Checked)
        assert (checked.total_blocks, checked.fits) == (7, False)

    play(scene, decoded__num_blocks=7)


def test_a_client_that_asks_nothing_is_cut_off(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        user = app.knock()
        await turns()
        app.service.clock.advance(59)
        assert (await app.status())["state"] == "waiting-for-peer"
        assert user.closed == []
        app.service.clock.advance(1)
        await user.until(lambda: user.closed)

    play(scene)


def test_a_request_that_waits_too_long_is_told_by_the_sweep(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        user = app.ask(generate(max_tokens=9))
        await user.until_received(wire.Tokens)
        await until(lambda: app.daemon._parts and app.daemon._parts.desk.num_ready)
        app.service.clock.advance(300)
        assert (await user.error()).code == "timeout"

    play(scene)


def test_a_client_that_has_caught_up_is_handed_over_at_once(play: Play) -> None:
    """Nothing else may happen that would look at the queue again."""

    async def scene(app: App) -> None:
        await app.loaded()
        user = app.ask(generate(max_tokens=9))
        await user.until_received(wire.Tokens)
        assert app.daemon._parts is not None
        desk, link = app.daemon._parts.desk, Link()
        await until(lambda: desk.num_ready)
        desk.link_opened(link, [])
        desk.update_credits(wire.Credits(free_blocks=9, free_sequences=9, queue_depth=0, seen=0))
        (client,) = [client for client in app.daemon._clients if client.has_asked]
        app.daemon.on_flushed(client)
        assert len(link.handed_over) == 1

    play(scene)


def test_one_connection_too_many_is_busy(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefilld.app.MAX_CLIENTS", 2)

    async def scene(app: App) -> None:
        await app.loaded()
        held = [app.knock() for _ in range(2)]
        error = await app.knock().error()
        assert (error.code, error.retryable) == ("busy", True)
        held[0].socket.close()
        await until(lambda: len(app.daemon._clients) == 1)
        user = app.ask(generate(max_tokens=1))
        await user.end()

    play(scene)


def test_connections_that_were_handed_over_do_not_count_for_ever(
    play: Play, host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many answers as there may be connections nobody would be served any more."""
    monkeypatch.setattr("prefilld.app.MAX_CLIENTS", 2)

    async def scene(app: App) -> None:
        async with adopting_decoded(app, host) as handoffs:
            app.start()
            await until(lambda: app.service.state == "serving")
            for number in range(1, 4):
                user = app.ask(generate(max_tokens=9))
                await user.until(lambda user=user: user.closed or wire.Error in user.kinds)
                assert len(handoffs) == number, user.messages
            assert len(app.daemon._clients) == 0

    play(scene)


def test_a_broken_request_is_refused_counted_and_harms_nobody(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        user = app.knock()
        user.raw.send(b"\x00\x00\x00\x01\xc0")
        assert (await user.error()).code == "malformed-frame"
        await until(lambda: not app.daemon._clients)
        counters = (await app.status())["counters"]
        assert counters['kvpair_protocol_errors_total{code="malformed-frame"}'] == 1

    play(scene)


def test_a_daemon_that_drains_finishes_what_it_began_and_takes_nothing_new(play: Play) -> None:
    async def scene(app: App) -> None:
        early = app.ask(generate(max_tokens=9))
        late = app.knock()
        await app.loaded()
        await early.until_received(wire.Tokens)  # it waits for a decoded that never comes
        app.service.drain(reason="test")
        await turns()
        late.socket.send(generate(max_tokens=1))
        assert (await late.error()).code == "draining"
        newcomer = app.ask(generate(max_tokens=1))
        assert (await newcomer.error()).code == "draining", "with no socket we would look dead"
        assert app.serving is not None
        assert not app.serving.done()
        early.socket.send(wire.Cancel())
        await early.end()
        await app.serving

    play(scene)


def test_under_socket_activation_a_draining_daemon_leaves_the_queue_to_its_successor(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was let in is answered, though it asks late; whoever comes now waits."""
    monkeypatch.setattr("prefilld.app.HEAR_OUT_S", 20.0)

    async def scene(app: App) -> None:
        await app.loaded()
        late = app.knock()
        await until(lambda: len(app.daemon._clients) == 1)
        app.service.drain(reason="test")
        await turns()
        newcomer = app.ask(generate(max_tokens=1))
        late.socket.send(generate(max_tokens=1))
        await late.until_received(wire.End)
        assert app.serving is not None
        await app.serving
        app.daemon.close()
        assert (newcomer.messages, newcomer.closed) == ([], [])
        managers.accept()[0].close()

    with socket.socket(socket.AF_UNIX) as managers:
        play(scene, passed=managers)


def test_a_daemon_that_ends_tells_everybody_who_is_left(play: Play) -> None:
    """Its time was over before their turn came."""

    async def scene(app: App) -> None:
        await app.loaded()
        silent = app.knock()
        user = app.ask(generate(max_tokens=9))
        await user.until_received(wire.Tokens)
        app.service.drain(reason="test")
        app.daemon.close()
        for one in (silent, user):
            error = await one.error()
            assert (error.code, error.retryable) == ("draining", True)

    play(scene)


def test_a_daemon_that_fails_does_not_call_it_draining(play: Play) -> None:
    async def scene(app: App) -> None:
        await app.loaded()
        user = app.ask(generate(max_tokens=9))
        await user.until_received(wire.Tokens)
        app.daemon.close()
        assert (await user.error()).code == "internal"

    play(scene)


def test_books_that_contradict_each_other_end_an_idle_daemon(play: Play) -> None:
    """Whatever broke them, the next answer might be somebody else's."""

    async def scene(app: App) -> None:
        await app.loaded()
        assert app.daemon._parts is not None
        failure = await failure_of_contradicting_books(app.service, app.daemon._parts.allocator)
        assert "the books say" in str(failure)

    play(scene)
