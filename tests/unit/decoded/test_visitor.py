"""A connection until it is known what it wants."""

from __future__ import annotations

import asyncio
import os
from typing import Any, cast

from decoded.link import LinkSession
from decoded.visitor import Visitor
from protocol import messages as wire
from protocol.closing import CloseReason
from protocol.states import Role
from tests.unit.protocol.recorder import Recorder
from tests.unit.protocol.samples import CREDITS, INSTANCE, SAMPLES
from tests.unit.shared.daemon.kit import run, socketpair, turns, until


class Handler:
    """Keeps who came."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def on_status(self, visitor: Visitor) -> None:
        self.told.append(("status",))
        visitor.finish(wire.Status(status={"state": "serving"}))

    def on_metrics(self, visitor: Visitor) -> None:
        self.told.append(("metrics",))
        visitor.finish(wire.Metrics(text="m 1\n"))

    def on_hello(self, _visitor: Visitor, hello: wire.Hello) -> None:
        self.told.append(("hello", hello))

    def on_gone(self, _visitor: Visitor, code: str | None) -> None:
        self.told.append(("gone", code))


class Session:
    """Keeps what a link's session was told."""

    def __init__(self) -> None:
        self.messages: list[wire.Message] = []
        self.reasons: list[CloseReason] = []

    def on_message(self, message: wire.Message, _fds: list[int] | None) -> None:
        self.messages.append(message)

    def on_closed(self, reason: CloseReason) -> None:
        self.reasons.append(reason)


def visit(role: Role = Role.CLIENT) -> tuple[Visitor, Handler, Recorder]:
    ours, theirs = socketpair()
    handler = Handler()
    visitor = Visitor(ours, loop=asyncio.get_running_loop(), handler=handler, now_s=100)
    return visitor, handler, Recorder(theirs, role).start()


def test_status_and_metrics_are_answered_and_the_connection_ends() -> None:
    async def scene() -> None:
        for message, name, reply in (
            (wire.StatusRequest(), "status", wire.Status),
            (wire.MetricsRequest(), "metrics", wire.Metrics),
        ):
            _, handler, client = visit()
            client.socket.send(message)
            await client.until_received(reply)
            await client.until(lambda client=client: client.closed)
            assert handler.told == [(name,), ("gone", None)]

    run(scene())


def test_the_kernel_says_who_it_is() -> None:
    async def scene() -> None:
        visitor, _, _ = visit()
        assert visitor.credentials.pid == os.getpid()
        assert visitor.credentials.uid == os.geteuid()
        visitor.close()

    run(scene())


def test_a_request_for_prefilld_is_refused() -> None:
    """Decoded takes no prompts; the code says so instead of a closed connection."""

    async def scene() -> None:
        _, handler, client = visit()
        client.socket.send(wire.Generate(prompt="hi"))
        error = await client.until_received(wire.Error)
        assert isinstance(error, wire.Error)
        assert error.code == "unexpected-message"
        await until(lambda: handler.told == [("gone", "unexpected-message")])

    run(scene())


def test_a_visitor_that_asks_nothing_stalls() -> None:
    async def scene() -> None:
        visitor, _, _ = visit()
        assert not visitor.is_stalled(109.9, 10)
        assert visitor.is_stalled(110, 10)
        visitor.close()

    run(scene())


def test_a_link_passes_everything_to_its_session_and_never_stalls() -> None:
    async def scene() -> None:
        visitor, handler, prefilld = visit(Role.PREFILLD_LINK)
        hello = SAMPLES[wire.Hello]
        prefilld.socket.send(hello)
        await until(lambda: handler.told == [("hello", hello)])
        assert not visitor.is_stalled(1e6, 10)
        session = Session()
        visitor.become(cast("LinkSession", session))
        visitor.socket.send(
            wire.Welcome(instance=INSTANCE, access="pull", held=[], pool_blocks=1, credits=CREDITS)
        )
        await prefilld.until_received(wire.Welcome)
        visitor.close()
        await turns()
        assert session.reasons == [], "its session ends it, not the visitor"
        prefilld.socket.send(wire.Bye())
        await until(lambda: session.messages == [wire.Bye()])
        prefilld.socket.close()
        await until(lambda: session.reasons)
        assert handler.told[-1] == ("gone", None)

    run(scene())


def test_an_answer_to_a_visitor_that_left_is_dropped() -> None:
    async def scene() -> None:
        visitor, handler, client = visit()
        client.socket.close()
        await until(lambda: handler.told)
        visitor.finish(wire.Status(status={}))
        assert handler.told == [("gone", None)]

    run(scene())
