"""The hand-shake as prefilld sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from decoded.mapping import PeerPool
from prefilld.handshake import Exported, Handshake
from protocol import messages as wire
from protocol.closing import CloseKind, CloseReason
from protocol.connection import Connection
from protocol.errors import ConnectionLostError, LinkRefusedError
from protocol.limits import VERSION
from protocol.sockets import MessageSocket
from protocol.states import Role
from shared.daemon.devices import CPU_DEVICE
from shared.daemon.instance import this_instance
from shared.daemon.model_host import ModelHost
from shared.engine.thread import EngineThread
from shared.kv.control_page import ControlPage
from shared.kv.memfd import MemfdPool
from tests.unit.prefilld.recorders import EPOCH
from tests.unit.protocol.recorder import Recorder
from tests.unit.protocol.samples import CREDITS, INSTANCE
from tests.unit.shared.daemon.kit import is_closed, run, socketpair

WELCOME = wire.Welcome(instance=INSTANCE, access="pull", held=[], pool_blocks=9, credits=CREDITS)


@asynccontextmanager
async def meeting(host: ModelHost) -> AsyncIterator[tuple[Handshake, Exported, Recorder]]:
    """A hand-shake, what it offers, and decoded at the other end."""
    ours, theirs = socketpair()
    exported = Exported(
        pool=MemfdPool.create(host.layout),
        device=CPU_DEVICE,
        control_page=ControlPage.create(4),
        epoch=EPOCH,
        instance=this_instance(),
        host=host,
        engine=EngineThread(num_threads=1),
    )
    link = MessageSocket(ours, Connection(Role.PREFILLD_LINK), loop=asyncio.get_running_loop())
    handshake = Handshake(link, exported)
    link.start(lambda message, _: handshake.receive(message), handshake.ended)
    decoded = Recorder(theirs, Role.DECODED_CLIENT).start()
    try:
        yield handshake, exported, decoded
    finally:
        for fds in decoded.fds:
            for fd in fds or ():
                os.close(fd)
        await exported.engine.stop()
        exported.control_page.close()


def answer_with(
    decoded: Recorder, answers: dict[type[wire.Message], Callable[[wire.Message], wire.Message]]
) -> None:
    def react(message: wire.Message) -> None:
        decoded.socket.send(answers[type(message)](message))

    decoded.react = react


def mapped(decoded: Recorder, host: ModelHost) -> Callable[[wire.Message], wire.Mapped]:
    """Answer MAP as decoded does: from what is read through the mapping."""

    def answer(message: wire.Message) -> wire.Mapped:
        assert isinstance(message, wire.Map)
        pool = PeerPool(message, decoded.fds[-1] or [], host.layout, CPU_DEVICE)
        reply = wire.Mapped(digest=pool.digest, bandwidth_gb_s=pool.bandwidth_gb_s, credits=CREDITS)
        assert pool.close()
        return reply

    return answer


def play(scene: Coroutine[Any, Any, None]) -> None:
    run(scene)


def test_the_pool_is_proved_by_what_was_read_through_the_mapping(host: ModelHost) -> None:
    async def scene() -> None:
        async with meeting(host) as (handshake, exported, decoded):
            answer_with(decoded, {wire.Hello: lambda _: WELCOME, wire.Map: mapped(decoded, host)})
            assert await handshake.greet() == WELCOME
            proved = await handshake.prove()
            assert proved.bandwidth_gb_s > 0
            assert handshake.left_over() == []
            hello, told = decoded.messages
            assert isinstance(hello, wire.Hello)
            assert (hello.version, hello.epoch, hello.backend) == (VERSION, EPOCH, "memfd")
            assert hello.fields == host.fields
            assert hello.fingerprint == host.fingerprint
            assert isinstance(told, wire.Map)
            assert (told.num_blocks, told.control_slots) == (16, 4)
            assert told.pool_bytes == exported.pool.layout.pool_bytes

    play(scene())


def test_each_proof_is_a_new_pattern(host: ModelHost) -> None:
    """An old one could be read through an old mapping."""

    async def scene() -> list[bytes]:
        digests = []
        for _ in range(2):
            async with meeting(host) as (handshake, _, decoded):
                answer_with(
                    decoded, {wire.Hello: lambda _: WELCOME, wire.Map: mapped(decoded, host)}
                )
                await handshake.greet()
                digests.append((await handshake.prove()).digest)
        return digests

    first, second = run(scene())
    assert first != second


def test_descriptors_are_closed_here_once_they_are_sent(
    host: ModelHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported_fds: list[int] = []
    export = MemfdPool.export

    def noted(pool: MemfdPool) -> int:
        exported_fds.append(export(pool))
        return exported_fds[-1]

    monkeypatch.setattr(MemfdPool, "export", noted)

    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            answer_with(decoded, {wire.Hello: lambda _: WELCOME})
            await handshake.greet()
            decoded.react = None
            proving = asyncio.ensure_future(handshake.prove())
            await decoded.until_received(wire.Map)
            await asyncio.sleep(0)
            assert is_closed(exported_fds[0]) or exported_fds[0] in (decoded.fds[-1] or [])
            proving.cancel()

    play(scene())


def test_another_digest_is_another_pool_and_decoded_is_told(host: ModelHost) -> None:
    """Whatever would be read through that mapping is not the prompt."""

    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            wrong = wire.Mapped(digest=bytes(32), bandwidth_gb_s=1, credits=CREDITS)
            answer_with(decoded, {wire.Hello: lambda _: WELCOME})
            await handshake.greet()

            def answer_map(message: wire.Message) -> None:
                if isinstance(message, wire.Map):
                    decoded.socket.send(wrong)

            decoded.react = answer_map
            with pytest.raises(LinkRefusedError, match=r"link refused \(proof\): digest is"):
                await handshake.prove()
            refuse = await decoded.until_received(wire.Refuse)
            assert isinstance(refuse, wire.Refuse)
            assert (refuse.code, refuse.theirs) == ("proof", "00" * 32)

    play(scene())


def test_a_refusal_is_told_as_seen_from_here(host: ModelHost) -> None:
    """What decoded calls ours is theirs."""

    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            refuse = wire.Refuse(
                code="fingerprint", field="kv_dtype", ours="bfloat16", theirs="float32", message="m"
            )
            answer_with(decoded, {wire.Hello: lambda _: refuse})
            with pytest.raises(
                LinkRefusedError, match="kv_dtype is 'float32' here and 'bfloat16' there; m"
            ) as caught:
                await handshake.greet()
            assert caught.value.reason == "fingerprint"

    play(scene())


def test_a_decoded_that_leaves_is_a_lost_connection(host: ModelHost) -> None:
    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            answer_with(decoded, {wire.Hello: lambda _: wire.Bye()})
            with pytest.raises(ConnectionError, match="decoded is leaving"):
                await handshake.greet()

    play(scene())


def test_a_connection_that_ends_in_the_hand_shake_says_how(host: ModelHost) -> None:
    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            await_greeting = asyncio.ensure_future(handshake.greet())
            await decoded.until_received(wire.Hello)
            decoded.socket.close()
            with pytest.raises(ConnectionError, match="ended during the hand-shake: the peer"):
                await await_greeting

    play(scene())


def test_a_connection_that_ends_before_map_is_out_is_lost(host: ModelHost) -> None:
    async def scene() -> None:
        async with meeting(host) as (handshake, _, decoded):
            answer_with(decoded, {wire.Hello: lambda _: WELCOME})
            await handshake.greet()
            decoded.socket.close()
            with pytest.raises((ConnectionLostError, ConnectionError), match="ended"):
                await handshake.prove()

    play(scene())


def test_what_arrives_behind_mapped_is_left_over_in_order(host: ModelHost) -> None:
    async def scene() -> None:
        async with meeting(host) as (handshake, _, _decoded):
            reason = CloseReason(CloseKind.GONE)
            handshake.receive(wire.Drain())
            handshake.ended(reason)
            assert handshake.left_over() == [wire.Drain(), reason]
            assert handshake.left_over() == []

    play(scene())


def test_an_error_in_the_hand_shake_tells_its_reason(host: ModelHost) -> None:
    """Until decoded has read HELLO it refuses prefilld like a client."""

    async def scene() -> None:
        async with meeting(host) as (handshake, _, _decoded):
            handshake.receive(
                wire.Error(code="invalid-message", message="hello: bad field", retryable=False)
            )
            with pytest.raises(ConnectionError, match=r".+") as caught:
                await handshake.greet()
            assert "hello: bad field" in str(caught.value)

    play(scene())
