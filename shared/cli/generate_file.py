"""`kvpair generate --file`: many prompts, their answers as JSON lines, some at a time.

A broken line is named by its number and the rest is done; run again, the command asks only what
has no answer yet.  Ctrl-C leaves a file of answers that is whole as far as it goes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shared.cli.progress import progress_bar
from shared.cli.prompt_file import AnswerFile, read_lines
from shared.cli.prompt_runner import PromptRunner
from shared.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from protocol.client import Client
    from protocol.exchange import Options

MAX_CONCURRENCY = 256
DEFAULT_CONCURRENCY = 8


def generate_file(
    client: Client, defaults: Options, *, prompts: Path, output: Path | None, concurrency: int
) -> ExitCode:
    """Answer every line of a file.

    Args:
        client: Whom to ask.
        defaults: What a request says where its line says nothing.
        prompts: The file of prompts.
        output: The file of answers, which is gone on with where it is there; None for stdout.
        concurrency: Requests at a time.

    Raises:
        UsageError: A file cannot be used.
        UnixSocketError: No daemon can be reached; what was answered is in the file.
    """
    done = AnswerFile(output).done(read_lines(prompts))
    num_lines = sum(1 for _ in read_lines(prompts))
    left = (line for line in read_lines(prompts) if line.number not in done)
    num_failed = 0
    runner = PromptRunner(client, defaults, concurrency=concurrency)
    num_over = len(done)
    try:
        with _writing(output) as write, progress_bar(num_lines, num_over) as advance:
            for result in runner.run(left):
                write(json.dumps(result.answer, ensure_ascii=False) + "\n")
                num_over += 1
                if result.fault is not None:
                    num_failed += 1
                    _say(f"{prompts}: line {result.line.number}: {result.fault}")
                advance()
    except KeyboardInterrupt:
        again = "" if output is None else "; the same command goes on with the others"
        _say(f"stopped after {num_over} of {num_lines} lines{again}")
        return ExitCode.INTERRUPTED
    before = f", {len(done)} of them before" if done else ""
    _say(f"{num_lines - num_failed} of {num_lines} lines answered{before}")
    return ExitCode.FAILED if num_failed else ExitCode.OK


@contextmanager
def _writing(output: Path | None) -> Iterator[Callable[[str], object]]:
    """Give what writes one line at once, so that a crash tears the last one at most."""
    if output is None:

        def write(text: str) -> None:
            sys.stdout.write(text)
            sys.stdout.flush()

        yield write
        return

    def append(text: str) -> None:
        with _written(output):
            file.write(text)

    with _written(output):
        file = output.open("a", encoding="utf-8", buffering=1)
    with file:
        yield append


@contextmanager
def _written(output: Path) -> Iterator[None]:
    """Name the file that could not be written; only that happens inside."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from error


def _say(text: str) -> None:
    click.echo(f"kvpair: {text}", err=True)
