"""A file of prompts and the file of their answers: JSON lines, matched by number and content.

A line of prompts is a JSON string, or an object with `prompt` and what a request may say beside it
(`max_tokens`, `sampling`, `system`, …; flags of the command stand for what is left out).  A line of
answers has `line`, the prompt's number from 1, and `input`, a digest of the prompt's line, so that
a run which was interrupted goes on where it stopped, and never with another file's answers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from protocol.errors import RequestError
from protocol.exchange import Options, Prompt, request_message
from protocol.messages import ChatMessage, Generate, Sampling
from shared.errors import UsageError

MAX_LINE_BYTES = 64 << 20
"""Longest line of either file; no daemon can be configured to take more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One line of the file of prompts."""

    number: int
    """From 1."""
    data: bytes
    """Without the newline."""

    @property
    def digest(self) -> str:
        """What tells it from a line that was changed."""
        return hashlib.sha256(self.data).hexdigest()[:16]


class BrokenLineError(Exception):
    """A line that is no request; the text says why."""


def read_lines(path: Path) -> Iterator[PromptLine]:
    """Yield the lines of a file that are not empty.

    Raises:
        UsageError: The file cannot be read, or a line is longer than any daemon takes.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    raise UsageError(f"{path}: line {number} has more than {MAX_LINE_BYTES} bytes")
                if data.strip():
                    yield PromptLine(number=number, data=data.rstrip(b"\r\n"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error


def parse_line(line: PromptLine, defaults: Options) -> tuple[Prompt, Options]:
    """Return what a line asks.

    Raises:
        BrokenLineError: It is no JSON, or not a request that any daemon would take.
    """
    try:
        body = json.loads(line.data)
    except json.JSONDecodeError as error:  # its text would name a line 1 that is none of the file's
        raise BrokenLineError(f"no JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise BrokenLineError(f"no JSON: {' '.join(str(error).split())}") from error
    if isinstance(body, str):
        body = {"prompt": body}
    if not isinstance(body, dict) or "prompt" not in body:
        raise BrokenLineError("neither a text nor an object with a `prompt`")
    prompt, options = _prompt(body), _options(body, defaults)
    try:
        request_message(Generate, prompt, options)
    except RequestError as error:
        raise BrokenLineError(error.message) from error
    return prompt, options


def _prompt(body: dict[str, Any]) -> Prompt:
    prompt, system = body.pop("prompt"), body.pop("system", None)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        try:
            prompt = msgspec.convert(prompt, list[ChatMessage])
        except msgspec.ValidationError as error:
            raise BrokenLineError(f"chat messages that are none: {error}") from error
    if system is None:
        return prompt  # type: ignore[no-any-return]  # judged with the request
    if not isinstance(system, str) or not isinstance(prompt, str):
        raise BrokenLineError("`system` is a text and goes with a `prompt` that is one")
    return [ChatMessage(role="system", content=system), ChatMessage(role="user", content=prompt)]


def _options(body: dict[str, Any], defaults: Options) -> Options:
    sampling = body.pop("sampling", {})
    if not isinstance(sampling, dict):
        raise BrokenLineError("`sampling` is no object")
    before = msgspec.to_builtins(defaults.get("sampling", Sampling()))
    try:
        merged = msgspec.convert(before | sampling, Sampling)
    except msgspec.ValidationError as error:
        raise BrokenLineError(f"`sampling`: {error}") from error
    return {**defaults, **body, "sampling": merged}  # type: ignore[typeddict-item]  # judged as a whole


class AnswerFile:
    """The file of answers; what is in it already need not be asked again.

    Args:
        path: Where; None for a file that is nowhere, and so has nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def done(self, lines: Iterator[PromptLine]) -> set[int]:
        """Keep what answers these lines, drop failures and torn lines, return what is answered.

        Raises:
            UsageError: The file cannot be read or written, or it answers other prompts.
        """
        # A pipe or a device is only written to, and must not be replaced.  What cannot be looked at
        # `os.path` takes for no file; opening it says why.
        if self._path is None or not os.path.isfile(self._path):
            return set()
        path = self._path.resolve()  # a link stays one
        digests = {line.number: line.digest for line in lines}
        kept: dict[int, bytes] = {}
        try:
            with path.open("rb") as file:
                for data in file:
                    entry = _entry(data)
                    if entry is None or "error" in entry:
                        continue
                    number = entry["line"]
                    if digests.get(number) != entry["input"]:
                        raise UsageError(
                            f"{path} answers other prompts (line {number})",
                            hint="name another file with --output, or remove it",
                        )
                    kept[number] = data
            part = path.with_name(path.name + ".part")
            part.write_bytes(b"".join(kept.values()))
            part.replace(path)
        except OSError as error:
            raise UsageError(f"{path} cannot be used: {error.strerror}") from error
        return set(kept)


def _entry(data: bytes) -> dict[str, Any] | None:
    """Return a line of answers; None for one that was torn, or never was one."""
    with suppress(ValueError, RecursionError):
        entry = json.loads(data)
        if (
            data.endswith(b"\n")
            and isinstance(entry, dict)
            and isinstance(entry.get("line"), int)
            and isinstance(entry.get("input"), str)
        ):
            return entry
    return None
