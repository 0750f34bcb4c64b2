"""`shared.cli.bench_processes`: every request is asked once, and no process is waited for long."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.messages import Accepted, End, Generate, Timings, Tokens, Usage
from shared.cli.bench_plan import Ask
from shared.cli.bench_processes import CORES_A_PROCESS, ClientProcesses, num_processes_for
from shared.errors import KvpairError

if TYPE_CHECKING:
    from shared.cli.bench_stream import Heard
    from tests.unit.shared.cli.conftest import Peer, Serve

ASKS = [Ask(num_prompt_tokens=4, num_tokens=2, seed=seed) for seed in range(5)]


def begin(peer: Peer) -> Generate:
    request = peer.receive()
    assert isinstance(request, Generate)
    name = request.id or ""
    peer.send(Accepted(id=name, seed=1, prompt_tokens=4, cached_tokens=0, fingerprint="f"))
    peer.send(Tokens(index=0, ids=[1, 2], text="ab"))
    return request


def answer(peer: Peer) -> None:
    begin(peer)
    usage = Usage(prompt_tokens=4, cached_tokens=0, completion_tokens=2)
    timings = Timings(queue=0, prefill=0, decode=0, total=0)
    peer.send(End(reason="length", usage=usage, timings_ms=timings))


@pytest.mark.parametrize("concurrency", [1, 5])
def test_each_request_is_asked_once_however_they_are_shared(
    serve: Serve, socket_path: Path, concurrency: int
) -> None:
    """Also where fewer run at a time than there are processes, and in one run after another."""
    serve(answer)
    with ClientProcesses(socket_path, vocab_size=100, num_processes=2) as processes:
        for _ in range(2):
            heard: list[Heard] = []
            run = processes.run(
                ASKS,
                concurrency=concurrency,
                is_open=False,
                time_limit_s=60,
                on_heard=heard.append,
            )
            assert sorted(each.ask.seed for each in heard) == [0, 1, 2, 3, 4]
            assert all(each.end is not None and len(each.token_ns) == 2 for each in heard)
            assert not run.is_out_of_time
            assert run.busy > 0


def test_a_request_is_not_sent_before_it_is_due(serve: Serve, socket_path: Path) -> None:
    serve(answer)
    asks = [Ask(num_prompt_tokens=4, num_tokens=2, seed=n, start_s=0.05 * n) for n in range(3)]
    heard: list[Heard] = []
    with ClientProcesses(socket_path, vocab_size=100, num_processes=1) as processes:
        processes.run(asks, concurrency=3, is_open=True, time_limit_s=60, on_heard=heard.append)
    heard.sort(key=lambda each: each.due_ns)
    assert all(each.sent_ns >= each.due_ns for each in heard)
    assert [each.due_ns - heard[0].due_ns for each in heard] == [0, 50_000_000, 100_000_000]


def test_a_process_that_dies_ends_the_run(serve: Serve, socket_path: Path) -> None:
    is_begun = threading.Event()

    def hang(peer: Peer) -> None:
        begin(peer)
        is_begun.set()
        with suppress(ConnectionResetError):
            assert peer.receive() is None, "its client is dead"

    serve(hang)
    with ClientProcesses(socket_path, vocab_size=100, num_processes=1) as processes:

        def kill() -> None:
            assert is_begun.wait(30)
            processes._processes[0].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(KvpairError, match="a process of clients has died"):
            processes.run(ASKS[:1], concurrency=1, is_open=False, time_limit_s=60, on_heard=print)
        killer.join()


@pytest.mark.parametrize("cancelled", ["before", "amid the orders"])
def test_what_is_cancelled_before_it_runs_asks_nothing_more(
    serve: Serve, socket_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: str
) -> None:
    """Ctrl-C may come while a long load is drawn or given out, and counts then as it does later."""
    serve(answer)
    heard: list[Heard] = []
    with (
        ClientProcesses(socket_path, vocab_size=100, num_processes=2) as processes,
        monkeypatch.context() as patch,
    ):
        send = processes._orders[0].send

        def interrupted_send(order: object) -> None:
            patch.undo()
            processes.cancel()
            send(order)

        if cancelled == "before":
            processes.cancel()
        else:
            patch.setattr(processes._orders[0], "send", interrupted_send)
        asks = [replace(ask, start_s=3600.0) for ask in ASKS]
        run = processes.run(
            asks, concurrency=2, is_open=True, time_limit_s=20, on_heard=heard.append
        )
    assert heard == []
    assert not run.is_out_of_time


def test_a_process_that_dies_in_the_middle_of_a_report_is_named(socket_path: Path) -> None:
    with ClientProcesses(socket_path, vocab_size=100, num_processes=1) as processes:
        reader, writer = multiprocessing.Pipe(duplex=False)
        os.write(writer.fileno(), (1000).to_bytes(4, "big") + b"only the beginning")
        writer.close()
        processes._reports[0].close()
        processes._reports[0] = reader
        with pytest.raises(KvpairError, match="a process of clients has died"):
            processes.run(ASKS[:1], concurrency=1, is_open=False, time_limit_s=60, on_heard=print)


def test_ctrl_c_is_the_commands_alone_to_understand(socket_path: Path) -> None:
    """A terminal sends it to all; a client that ended by itself would take its answers along."""
    with ClientProcesses(socket_path, vocab_size=100, num_processes=1) as processes:
        status = Path(f"/proc/{processes._processes[0].pid}/status").read_text()
    blocked = int(status.partition("SigBlk:")[2].split()[0], base=16)
    assert blocked & 1 << (signal.SIGINT - 1)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_streams_are_spread_as_far_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small machine's cores are the daemons'; a large one has a process for eight streams."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(2))
    assert [num_processes_for(each) for each in (1, 8, 512)] == [1, 1, 1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: range(16 * CORES_A_PROCESS))
    assert [num_processes_for(each) for each in (1, 8, 9, 64, 512)] == [1, 1, 2, 8, 16]
