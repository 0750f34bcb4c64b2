"""`shared.logs`: one queue for everything, bounded lines, nothing secret, nobody waits."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from io import FileIO
from typing import Any

import pytest
import structlog

from shared import logs
from shared.logs.processors import MAX_LINE_BYTES
from shared.logs.writer import LogWriter

FLUSH_S = 10.0


class Pipe:
    """A pipe whose write end is the log's stream."""

    def __init__(self) -> None:
        read_fd, write_fd = os.pipe()
        self.reader, self.writer = FileIO(read_fd, "r"), FileIO(write_fd, "w")

    def lines(self) -> list[dict[str, Any]]:
        """Close the write end and parse everything that came through."""
        self.writer.close()
        return [json.loads(line) for line in self.reader.readall().splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.writer.close()
    pipe.reader.close()


@pytest.fixture
def writer(pipe: Pipe) -> Iterator[LogWriter]:
    writer = logs.configure(level="info", log_format="json", daemon="prefilld", stream=pipe.writer)
    yield writer
    writer.shutdown(FLUSH_S)


def test_a_line_carries_event_daemon_level_both_clocks_and_bound_ids(
    pipe: Pipe, writer: LogWriter
) -> None:
    """What ties the lines of a request together must be in each of them."""
    logs.get_logger().bind(request_id="r1").info("lease.released", lease_id=7)
    assert writer.shutdown(FLUSH_S)
    (line,) = pipe.lines()
    assert list(line)[:4] == ["timestamp", "level", "daemon", "event"]
    assert line["timestamp"].endswith("Z")
    assert line["monotonic_ns"] > 0
    assert (line["event"], line["daemon"], line["level"]) == ("lease.released", "prefilld", "info")
    assert (line["request_id"], line["lease_id"]) == ("r1", 7)


def test_lines_under_the_level_are_not_written(pipe: Pipe, writer: LogWriter) -> None:
    logs.get_logger().debug("step.done")
    assert writer.shutdown(FLUSH_S)
    assert pipe.lines() == []


def test_bytes_are_told_by_length_and_hash_only(pipe: Pipe, writer: LogWriter) -> None:
    """A handle is a capability: whoever reads the journal must not hold it."""
    handle = bytes(range(64))
    logs.get_logger().info("pool.mapped", handle=handle, nested={"handles": [handle]})
    assert writer.shutdown(FLUSH_S)
    (line,) = pipe.lines()
    assert line["handle"].startswith("<64 bytes, sha256 fdeab9acf371")
    assert line["nested"] == {"handles": [line["handle"]]}


@pytest.mark.parametrize(
    "values",
    [
        {"blocks": list(range(8192))},
        {f"key{index}": "y" * 1000 for index in range(40)},
        {"text": "\x00" * 100_000},
        {"deep": {"a": {"b": {"c": {"d": {"e": list(range(100))}}}}}},
        {"odd": "\udc80", "huge": 1 << 70, "nan": float("nan"), "object": object()},
        {"wide": {f"key{index}": "é" * 2000 for index in range(1000)}},
    ],
    ids=lambda values: next(iter(values)),
)
def test_every_line_is_json_and_short(
    pipe: Pipe, writer: LogWriter, values: dict[str, Any]
) -> None:
    """The journal splits long lines, and half a JSON object is none."""
    logs.get_logger().info("pool.mapped", **values)
    assert writer.shutdown(FLUSH_S)
    (line,) = pipe.lines()
    assert line["event"] == "pool.mapped"
    assert len(json.dumps(line, ensure_ascii=False, separators=(",", ":"))) <= MAX_LINE_BYTES


def test_a_value_whose_text_fails_does_not_fail_its_line(pipe: Pipe, writer: LogWriter) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    logs.get_logger().info("pool.mapped", value=Broken())
    assert writer.shutdown(FLUSH_S)
    assert pipe.lines()[0]["value"] == "<Broken, whose text failed: RuntimeError>"


def test_a_value_that_fails_when_it_is_looked_at_costs_its_line_only(
    pipe: Pipe, writer: LogWriter
) -> None:
    """Whoever logs must never fail by it, whatever it logs."""

    class Broken(dict[str, int]):
        def items(self) -> Any:  # noqa: ANN401 - never returns
            raise RuntimeError("no items")

    logs.get_logger().info("pool.mapped", value=Broken(a=1))
    assert writer.shutdown(FLUSH_S)
    (line,) = pipe.lines()
    assert (line["event"], line["level"]) == ("pool.mapped", "info")
    assert line["unrendered"] == "its values failed: RuntimeError"


def test_a_line_that_is_dropped_by_a_destructor_in_mid_drop_blocks_nobody(pipe: Pipe) -> None:
    """Garbage is collected anywhere, also between two halves of a count: no lock may be held."""
    writer = LogWriter(pipe.writer.fileno(), render_dropped=lambda _: b"", max_lines=0)

    class LogsAtItsEnd:
        def __del__(self) -> None:
            writer.put(b"again\n")

    def dropping() -> None:
        garbage = LogsAtItsEnd()
        writer.put(b"line\n")
        del garbage

    threads = [threading.Thread(target=lambda: [dropping() for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    looks = [writer.num_dropped for _ in range(100)]
    for thread in threads:
        thread.join(FLUSH_S)
    assert writer.num_dropped == 4000
    assert looks == sorted(looks)
    assert writer.shutdown(FLUSH_S)


def test_an_exception_keeps_the_end_of_its_traceback(pipe: Pipe, writer: LogWriter) -> None:
    """A deep recursion's traceback is long, and the fault stands last."""
    try:
        int("x" * 100_000 + "the fault")
    except ValueError as error:
        error.add_note("x" * 100_000 + "the fault")
        logs.get_logger().exception("daemon.failed")
    assert writer.shutdown(FLUSH_S)
    assert pipe.lines()[0]["exception"].endswith("the fault")


def test_a_reader_that_stopped_delays_nobody(pipe: Pipe) -> None:
    """Lines that find the queue full are dropped, counted, and the count is logged."""
    reached = threading.Event()

    def render_dropped(num_lines: int) -> bytes:
        reached.set()
        return json.dumps({"event": "log.dropped", "num_lines": num_lines}).encode() + b"\n"

    line = json.dumps({"event": "x" * 1000}).encode() + b"\n"
    writer = LogWriter(pipe.writer.fileno(), render_dropped=render_dropped, max_lines=100)
    for _ in range(5000):  # a pipe holds 64 KiB: the writer is stuck from the 64th line on
        writer.put(line)
    num_dropped = writer.num_dropped
    assert num_dropped > 4000
    assert not writer.shutdown(0.05), "nothing reads, so nothing can be flushed"
    received = bytearray()
    while not (reached.is_set() and received.endswith(b"}\n") and b"log.dropped" in received):
        received += os.read(pipe.reader.fileno(), 1 << 16)
    assert writer.shutdown(FLUSH_S)
    lines = [json.loads(text) for text in received.splitlines()]
    reported = [line["num_lines"] for line in lines if line["event"] == "log.dropped"]
    assert sum(reported) == num_dropped
    assert len(lines) - len(reported) == 5000 - num_dropped


def test_a_broken_stream_is_counted_and_raises_nothing(pipe: Pipe) -> None:
    pipe.reader.close()
    writer = LogWriter(pipe.writer.fileno(), render_dropped=lambda _: b"\n")
    writer.put(b"lost\n")
    assert writer.shutdown(FLUSH_S)
    writer.put(b"late\n")
    assert writer.num_dropped == 2


def test_the_standard_library_and_warnings_use_the_same_queue(
    pipe: Pipe, writer: LogWriter
) -> None:
    logging.getLogger("asyncio").warning("slow %s", "callback")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    assert writer.shutdown(FLUSH_S)
    first, second = pipe.lines()
    assert (first["event"], first["message"]) == ("library.logged", "slow callback")
    assert (first["logger"], first["level"]) == ("asyncio", "warning")
    assert "careful" in second["message"]


def test_a_thread_that_dies_is_logged(pipe: Pipe, writer: LogWriter) -> None:
    """Nobody watches a thread's stderr; its traceback belongs into the journal."""
    thread = threading.Thread(target=lambda: 1 / 0, name="engine")
    thread.start()
    thread.join()
    assert writer.shutdown(FLUSH_S)
    (line,) = pipe.lines()
    assert (line["event"], line["thread"]) == ("exception.uncaught", "engine")
    assert "ZeroDivisionError" in line["exception"]


def test_shutdown_puts_back_what_configure_replaced(pipe: Pipe) -> None:
    before = (sys.excepthook, threading.excepthook, sys.unraisablehook, logging.root.level)
    writer = logs.configure(level="debug", log_format="json", daemon="decoded", stream=pipe.writer)
    assert sys.excepthook is not before[0]
    assert writer.shutdown(FLUSH_S)
    assert (
        sys.excepthook,
        threading.excepthook,
        sys.unraisablehook,
        logging.root.level,
    ) == before


def test_events_can_be_captured(writer: LogWriter) -> None:
    """Logs are tested like return values."""
    log = logs.get_logger().bind(request_id="r1")
    with structlog.testing.capture_logs() as events:
        logs.get_logger().info("lease.released", lease_id=7)
    log.info("lease.opened")
    assert events == [{"event": "lease.released", "log_level": "info", "lease_id": 7}]


def test_a_pipe_gets_json_and_a_terminal_gets_text() -> None:
    """`auto` asks what stderr is, not the environment, which a desktop's terminals inherit."""
    program = (
        "from shared import logs\n"
        "writer = logs.configure(level='info', log_format='auto', daemon='prefilld')\n"
        "logs.get_logger().info('daemon.started', path='/x')\n"
        "writer.shutdown(5)\n"
    )
    piped = subprocess.run(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, check=True, timeout=60
    )
    assert json.loads(piped.stderr)["event"] == "daemon.started"
    leader, terminal = os.openpty()
    try:
        subprocess.run(
            [sys.executable, "-c", program],
            stderr=terminal,
            check=True,
            timeout=60,
            env={**os.environ, "INVOCATION_ID": "0", "JOURNAL_STREAM": "0:0"},
        )
        shown = os.read(leader, 1 << 16)
    finally:
        os.close(terminal)
        os.close(leader)
    assert b"daemon.started" in shown
    assert b"\x1b[" in shown
    assert not shown.startswith(b"{")
