"""Where `kvpair logs` finds lines: the journal, files, stdin; read once, or followed."""

from __future__ import annotations

import heapq
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol, Self

from shared.cli.log_lines import LogLine, Reorderer, in_order, parse_line
from shared.errors import EnvironmentUnsupportedError, KvpairError, UsageError

UNITS = ("prefilld.service", "decoded.service")
"""As `systemd/` has them."""

US_PER_S = 1_000_000

POLL_S = 0.1
"""Pause between two looks at a file that is followed."""

HOLD_S = 0.25
"""How long a followed line is held back for those that belong before it: both daemons' writers,
and the journal between, need a few milliseconds."""

READ_BYTES = 1 << 16

MAX_LINE_BYTES = 1 << 20
"""Longest line that is taken for one; a daemon's own are at most 8 KiB."""


class Source(Protocol):
    """Something that lines come from."""

    def read(self, timeout_s: float) -> list[LogLine] | None:
        """Return the lines that came, waiting for `timeout_s` at most; None at the end."""

    def close(self) -> None:
        """Give back what it holds."""


class _Splitter:
    """Cuts bytes into lines, however they were read."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[str]:
        self._pending += data
        *lines, rest = self._pending.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            lines.append(rest)
            rest = bytearray()
        self._pending = bytearray(rest)
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def finish(self) -> list[str]:
        """Return the last line, which has no end."""
        rest, self._pending = self._pending, bytearray()
        return [rest.decode(errors="replace")] if rest else []


class _Parser:
    """Turns a stream's text into lines; text without a time has that of the line before it."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._time_us = 0

    def __call__(self, text: str) -> LogLine:
        line = parse_line(text, source=self._source, time_us=self._time_us)
        self._time_us = line.time_us
        return line


class PipeSource:
    """A stream that ends when its writer does: stdin.

    Args:
        stream: Read through its descriptor.
        name: Who wrote lines that do not say so.
    """

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self._stream = stream
        self._split, self._parse = _Splitter(), _Parser(name)
        self._is_over = False

    def read(self, timeout_s: float) -> list[LogLine] | None:
        """Return the lines that came."""
        if self._is_over:
            return None
        fd = self._stream.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return []
        data = os.read(fd, READ_BYTES)
        self._is_over = not data
        texts = self._split.feed(data) if data else self._split.finish()
        return [self._parse(text) for text in texts if text]

    def close(self) -> None:
        """Leave the stream to its owner."""


class FileSource:
    """A file, from its beginning on.

    Args:
        path: Of the file.
        follow: Wait for more at its end, and begin anew where it was cut or replaced.

    Raises:
        UsageError: It cannot be read.
    """

    def __init__(self, path: Path, *, follow: bool) -> None:
        self._path, self._follow = path, follow
        self._file = self._open()
        self._split, self._parse = _Splitter(), _Parser(path.stem)

    def read(self, timeout_s: float) -> list[LogLine] | None:
        """Return the lines that came."""
        data = self._file.read(READ_BYTES)
        if data:
            return [self._parse(text) for text in self._split.feed(data) if text]
        if not self._follow:
            rest = self._split.finish()
            return [self._parse(text) for text in rest] or None
        if self._was_replaced():
            self._file.close()
            self._file = self._open()
        else:
            time.sleep(timeout_s)
        return []

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _open(self) -> IO[bytes]:
        try:
            return self._path.open("rb", buffering=0)
        except OSError as error:
            raise UsageError(f"cannot read {self._path}: {error.strerror}") from error

    def _was_replaced(self) -> bool:
        """Whether the path leads to another file by now, or to a shorter one."""
        opened = os.fstat(self._file.fileno())
        try:
            present = self._path.stat()
        except OSError:
            return False  # between two names: it is looked at again
        return not os.path.samestat(opened, present) or present.st_size < self._file.seek(
            0, os.SEEK_CUR
        )


class JournalSource:
    """Both units' lines in the system's journal, by way of `journalctl`.

    Args:
        follow: Wait for more.
        since_us: The earliest, since 1970; None for all.
        num_lines: How many of the last to begin with; None for all.

    Raises:
        EnvironmentUnsupportedError: There is no journal here.
    """

    def __init__(
        self, *, follow: bool, since_us: int | None = None, num_lines: int | None = None
    ) -> None:
        command = ["journalctl", "--output=json", "--no-pager"]
        command += [f"--unit={unit}" for unit in UNITS]
        command += ["--follow"] if follow else []
        command += [] if since_us is None else [f"--since=@{since_us / US_PER_S:.6f}"]
        command += [f"--lines={'all' if num_lines is None else num_lines}"]
        try:
            self._process = subprocess.Popen(  # noqa: S603  the command is ours
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise EnvironmentUnsupportedError(
                "there is no journal on this machine (journalctl does not run)",
                hint="name the files that hold the daemons' logs",
            ) from error
        assert self._process.stdout is not None
        self._stdout = self._process.stdout
        self._split = _Splitter()
        self._is_closing = False

    def read(self, timeout_s: float) -> list[LogLine] | None:
        """Return the lines that came.

        Raises:
            KvpairError: journalctl failed; it has said why on stderr.
        """
        fd = self._stdout.fileno()
        if not select.select([fd], [], [], timeout_s)[0]:
            return []
        data = os.read(fd, READ_BYTES)
        if data:
            return [line for text in self._split.feed(data) if (line := _from_journal(text))]
        code = self._process.wait()
        if code != 0:
            raise KvpairError(f"journalctl ended with {code}")
        return None

    def close(self) -> None:
        """End journalctl."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        self._stdout.close()
        self._process.wait()


def _from_journal(text: str) -> LogLine | None:
    """Read one entry of `journalctl --output=json`; None where it holds nothing to show."""
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    if not isinstance(entry, dict):
        return None
    message = entry.get("MESSAGE")
    if isinstance(message, list):  # bytes that are not text come as numbers
        message = bytes(byte for byte in message if isinstance(byte, int)).decode(errors="replace")
    if not isinstance(message, str):
        return None
    # UNIT names the unit that the service manager speaks about; its own is another.
    is_manager = "UNIT" in entry
    unit = str(entry.get("UNIT") or entry.get("_SYSTEMD_UNIT") or "")
    source = "systemd" if is_manager else unit.removesuffix(".service")
    stamp = str(entry.get("__REALTIME_TIMESTAMP", "0"))
    return parse_line(message, source=source, time_us=int(stamp) if stamp.isdigit() else 0)


class Sources:
    """Several sources as one stream of lines in order; a context manager that closes them all.

    Args:
        sources: Owned from here on.
        follow: Whether they go on behind what is there now.
    """

    def __init__(self, sources: Sequence[Source], *, follow: bool) -> None:
        self._sources, self._follow = list(sources), follow
        self._ended: list[Source] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources:
            source.close()

    def backlog(self) -> Iterator[LogLine]:
        """Yield what is there: everything, or, where it is followed, all that came so far."""
        streams = [in_order(self._read_backlog(source)) for source in self._sources]
        return heapq.merge(*streams, key=lambda line: (line.time_us, line.monotonic_ns))

    def live(self) -> Iterator[LogLine]:
        """Yield what comes behind `backlog`, each line once its place is certain."""
        reorderer = Reorderer()
        living = [source for source in self._sources if source not in self._ended]
        while living:
            for source in tuple(living):
                came = source.read(POLL_S / len(living))
                if came is None:
                    living.remove(source)
                    continue
                for line in came:
                    yield from reorderer.push(line, time.monotonic())
            yield from reorderer.held_before(time.monotonic() - HOLD_S)
        yield from reorderer.rest()

    def _read_backlog(self, source: Source) -> Iterator[LogLine]:
        while True:
            came = source.read(0 if self._follow else POLL_S)
            if came is None:
                self._ended.append(source)
                return
            if not came and self._follow:
                return
            yield from came
