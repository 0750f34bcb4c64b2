"""The awaited client against a scripted daemon: what differs from the blocking one."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol import messages as m
from protocol.async_client import AsyncClient
from protocol.codec import encode_message
from protocol.errors import (
    ConnectionLostError,
    DeadlineError,
    ListenQueueFullError,
    NoSuchSocketError,
    RequestError,
)
from protocol.listener import listen_unix
from protocol.resuming import Loss, ResumePolicy
from protocol.unix import connect_unix
from tests.unit.protocol.conftest import Run
from tests.unit.protocol.samples import SAMPLES
from tests.unit.protocol.scripted import Conversation, ScriptedDaemon
from tests.unit.protocol.test_client import (
    ANSWER,
    NO_RESUMING,
    RESTART_S,
    answers,
    goes_on,
    resets,
    vanishes,
    waits_for_the_client_to_leave,
)


def test_a_stream_yields_every_event_and_ends(run: Run, tmp_path: Path) -> None:
    """The same events as the blocking client's."""

    async def scenario() -> None:
        async with await AsyncClient(tmp_path / "s").stream("Why?") as stream:
            assert [event async for event in stream] == ANSWER
            assert [event async for event in stream] == []
            await stream.cancel()

    with ScriptedDaemon(tmp_path / "s", answers):
        run(scenario())


def test_many_answers_at_once(run: Run, tmp_path: Path) -> None:
    """One connection each, one loop for all."""

    async def scenario() -> None:
        client = AsyncClient(tmp_path / "s")
        got = await asyncio.gather(*(client.generate("Why?") for _ in range(8)))
        assert [answer.text for answer in got] == ["abc"] * 8
        assert all(answer.ttft_ms for answer in got)

    with ScriptedDaemon(tmp_path / "s", *[answers] * 8):
        run(scenario())


def test_the_questions_have_plain_answers(run: Run, tmp_path: Path) -> None:
    """One connection each."""

    def script(conversation: Conversation) -> None:
        question = conversation.receive()
        replies = {m.Check: m.Checked, m.StatusRequest: m.Status, m.MetricsRequest: m.Metrics}
        conversation.send(SAMPLES[replies[type(question)]])  # type: ignore[index]

    async def scenario() -> None:
        client = AsyncClient(tmp_path / "s")
        assert await client.check([1, 2, 3], max_tokens=64) == SAMPLES[m.Checked]
        assert await client.status() == SAMPLES[m.Status].status  # type: ignore[attr-defined]
        assert await client.metrics() == SAMPLES[m.Metrics].text  # type: ignore[attr-defined]

    with ScriptedDaemon(tmp_path / "s", script, script, script):
        run(scenario())


def test_cancel_ends_the_answer_early(run: Run, tmp_path: Path) -> None:
    """The client goes on reading until END says `cancelled`."""

    def script(conversation: Conversation) -> None:
        conversation.receive()
        conversation.send(*ANSWER[:2])
        assert conversation.receive() == m.Cancel()
        end = SAMPLES[m.End]
        conversation.send(m.End(reason="cancelled", usage=end.usage, timings_ms=end.timings_ms))  # type: ignore[attr-defined]

    async def scenario() -> None:
        async with await AsyncClient(tmp_path / "s").stream("Why?") as stream:
            assert [await anext(stream), await anext(stream)] == ANSWER[:2]
            await stream.cancel()
            (end,) = [event async for event in stream]
        assert isinstance(end, m.End)
        assert end.reason == "cancelled"

    with ScriptedDaemon(tmp_path / "s", script):
        run(scenario())


def test_a_cancelled_wait_loses_no_token(run: Run, tmp_path: Path) -> None:
    """Callers wrap `anext` in time-outs of their own; the stream goes on behind them."""
    go_on = threading.Event()

    def script(conversation: Conversation) -> None:
        conversation.receive()
        conversation.send(ANSWER[0])
        conversation.raw.sendall(encode_message(ANSWER[1])[:9])
        go_on.wait()
        conversation.raw.sendall(encode_message(ANSWER[1])[9:])
        conversation.raw.sendall(encode_message(ANSWER[2]) + encode_message(ANSWER[3]))

    async def scenario() -> None:
        async with await AsyncClient(tmp_path / "s").stream("Why?") as stream:
            assert await anext(stream) == ANSWER[0]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.02):
                    await anext(stream)
            go_on.set()
            assert [event async for event in stream] == ANSWER[1:]

    with ScriptedDaemon(tmp_path / "s", script):
        run(scenario())


def test_a_cancelled_request_closes_its_connection(run: Run, tmp_path: Path) -> None:
    """A task that is cancelled must not leave a request running behind it."""

    async def scenario() -> None:
        task = asyncio.ensure_future(AsyncClient(tmp_path / "s").generate("Why?"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await task

    with ScriptedDaemon(tmp_path / "s", waits_for_the_client_to_leave):
        run(scenario())


def test_faults_are_the_blocking_clients(run: Run, tmp_path: Path) -> None:
    """ERROR, an early end, silence, no daemon, a wrong request: same types, same texts."""

    def refuses(conversation: Conversation) -> None:
        conversation.receive()
        conversation.send(SAMPLES[m.Error])

    async def scenario() -> None:
        client = AsyncClient(tmp_path / "s", resume_policy=NO_RESUMING)
        with pytest.raises(RequestError, match="come back later"):
            await client.generate("Why?")
        with pytest.raises(ConnectionLostError, match="tokens delivered: 1"):
            await client.generate("Why?")
        with pytest.raises(ConnectionLostError, match="tokens delivered: 0"):
            await client.generate("Why?")
        with pytest.raises(DeadlineError, match=r"silent for 0\.05 s"):
            await AsyncClient(tmp_path / "s", timeout_s=0.05).generate("Why?")
        with pytest.raises(RequestError, match="max_tokens"):
            await client.generate("Why?", max_tokens=0)
        with pytest.raises(NoSuchSocketError, match="start the daemons"):
            await AsyncClient(tmp_path / "none").status()

    with ScriptedDaemon(tmp_path / "s", refuses, vanishes, resets, waits_for_the_client_to_leave):
        run(scenario())


def test_a_full_queue_of_connections_is_tried_until_the_deadline(run: Run, tmp_path: Path) -> None:
    """Without blocking the loop meanwhile."""

    async def scenario() -> None:
        with pytest.raises(ListenQueueFullError, match="try again"):
            await AsyncClient(tmp_path / "s", connect_timeout_s=0.05).status()

    with listen_unix(tmp_path / "s", backlog=0), connect_unix(tmp_path / "s"):
        run(scenario())


def test_a_cut_answer_goes_on_once_a_daemon_is_back(run: Run, tmp_path: Path) -> None:
    """The same events as those of an answer in one piece; the loop is free meanwhile."""
    path, daemons = tmp_path / "s", ExitStack()
    first = daemons.enter_context(ScriptedDaemon(path, vanishes))
    restart = threading.Timer(
        RESTART_S, lambda: daemons.enter_context(ScriptedDaemon(path, goes_on))
    )

    def on_loss(_loss: Loss) -> None:
        first.close()
        restart.start()

    async def scenario() -> None:
        client = AsyncClient(path, resume_policy=ResumePolicy(on_loss=on_loss))
        async with await client.stream("Why?") as stream:
            assert [event async for event in stream] == ANSWER

    with daemons:
        run(scenario())
        restart.join()


def test_a_cancel_ends_the_wait_for_a_daemon(run: Run, tmp_path: Path) -> None:
    """The loss is told at once, not a minute later."""
    daemon = ScriptedDaemon(tmp_path / "s", vanishes)

    async def scenario() -> None:
        lost = asyncio.Event()
        policy = ResumePolicy(on_loss=lambda _: lost.set())
        async with await AsyncClient(daemon.path, resume_policy=policy).stream("Why?") as stream:
            assert [await anext(stream), await anext(stream)] == ANSWER[:2]
            daemon.close()
            waiting = asyncio.ensure_future(anext(stream))
            await lost.wait()
            await stream.cancel()
            with pytest.raises(ConnectionLostError, match="delivered: 1; it was cancelled"):
                await waiting

    with daemon:
        run(scenario())


def test_a_cancelled_pause_is_kept_by_the_next_wait(run: Run, tmp_path: Path) -> None:
    """A caller with time-outs of its own must not storm a daemon that is not there."""
    daemon = ScriptedDaemon(tmp_path / "s", vanishes)
    losses: list[Loss] = []

    async def scenario() -> None:
        policy = ResumePolicy(on_loss=losses.append, reconnect_timeout_s=0.3)
        async with await AsyncClient(daemon.path, resume_policy=policy).stream("Why?") as stream:
            assert [await anext(stream), await anext(stream)] == ANSWER[:2]
            daemon.close()
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.001):
                        await anext(stream)
            with pytest.raises(ConnectionLostError, match="nobody went on with it within"):
                await anext(stream)
        assert len(losses) == 1

    with daemon:
        run(scenario())
