"""`kvpair generate`: one prompt, one answer.  Text on stdout as it comes, all else on stderr.

Ctrl-C asks the daemon to stop and still takes what it had computed; a second one leaves at once.
An answer that breaks off because a daemon died goes on once it can, and a line on stderr says so.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

import click
import msgspec

from protocol.client import AnswerStream, Client
from protocol.errors import ConnectionLostError, ProtocolError, RequestError
from protocol.exchange import Event, Options, Prompt
from protocol.limits import MAX_TOP_LOGPROBS
from protocol.messages import Accepted, ChatMessage, End, TokenLogprob, Tokens
from shared.cli.answer_options import AnswerFlags, answer_options
from shared.cli.losses import telling_policy
from shared.config.paths import client_socket
from shared.errors import ExitCode, UsageError

MAX_PROMPT_BYTES = 64 << 20
"""Most that is read from stdin; no daemon can be configured to take more."""


@click.command
@click.argument("prompt", required=False)
@click.option("--raw", is_flag=True, help="Take the prompt as it is, without a chat template.")
@click.option("--system", metavar="TEXT", help="Put a system message before the prompt.")
@answer_options
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_TOP_LOGPROBS),
    metavar="N",
    help="With --json: tell how likely each token was, and the N likeliest.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, at the end.")
@click.option("--no-stream", is_flag=True, help="Print the answer at once when it is whole.")
@click.option("--socket", metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET.")
def generate(
    answer: AnswerFlags,
    *,
    prompt: str | None,
    raw: bool,
    system: str | None,
    logprobs: int | None,
    as_json: bool,
    no_stream: bool,
    socket: str | None,
) -> ExitCode:
    """Answer a prompt.

    PROMPT is the text; "-", or none where stdin is no terminal, reads it from stdin.
    """
    if raw and system is not None:
        raise UsageError("--system needs the chat template that --raw leaves out")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is told with --json only")
    options: Options = {
        **answer.options(),
        "raw": raw,
        "stream": not no_stream,
        "logprobs": logprobs,
    }
    text = _read_prompt(prompt, keep_newline=raw)
    if not text:
        raise UsageError("the prompt is empty")
    client = Client(client_socket(os.environ, chosen=socket), resume_policy=telling_policy())
    received, interrupt = _Received(began_s=time.monotonic()), _Interrupt()
    try:
        with (
            client.stream(_with_system(text, system), **options) as stream,
            _cancelled_by_interrupt(stream, interrupt),
        ):
            for event in stream:
                received.add(event, now_s=time.monotonic())
                if isinstance(event, Tokens) and not as_json:
                    _show(event.text)
    except (ProtocolError, RequestError) as error:
        received.error = error
        # Whoever cancelled an answer does not care that its daemon is gone as well.
        if not (interrupt.was_seen and isinstance(error, ConnectionLostError)):
            _finish(received, as_json=as_json)
            raise
    _finish(received, as_json=as_json)
    if not interrupt.was_seen:
        return ExitCode.OK
    click.echo(f"kvpair: cancelled after {len(received.ids)} tokens", err=True)
    return ExitCode.INTERRUPTED


def _read_prompt(prompt: str | None, *, keep_newline: bool) -> str:
    """Return the prompt; from stdin without the newline that every shell's `echo` adds."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UsageError("no prompt", hint="give it as an argument or on stdin")
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise UsageError(f"the prompt on stdin has more than {MAX_PROMPT_BYTES} bytes")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"the prompt on stdin is not UTF-8 (byte {error.start})") from error
    return text if keep_newline else text.removesuffix("\n")


def _with_system(text: str, system: str | None) -> Prompt:
    if system is None:
        return text
    return [ChatMessage(role="system", content=system), ChatMessage(role="user", content=text)]


def _show(text: str) -> None:
    """Write to stdout now; a locale that lacks a character gets a question mark."""
    encoding = sys.stdout.encoding
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


@dataclass(slots=True, kw_only=True)
class _Received:
    """What has arrived of the answer."""

    began_s: float
    accepted: Accepted | None = None
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ttft_ms: float | None = None
    end: End | None = None
    error: ProtocolError | RequestError | None = None

    def add(self, event: Event, *, now_s: float) -> None:
        match event:
            case Accepted():
                self.accepted = event
            case Tokens():
                if self.ttft_ms is None:
                    self.ttft_ms = round((now_s - self.began_s) * 1e3, 3)
                self.ids += event.ids
                self.texts.append(event.text)
                self.logprobs += event.logprobs or ()
            case End():
                self.end = event

    def as_json(self) -> dict[str, object]:
        """Return the answer; without END its reason is `error`, and nothing is made up."""
        timings = self.end.timings_ms if self.end else None
        accepted = self.accepted
        extra: dict[str, object] = {}
        if self.error is not None:
            extra["error"] = _describe(self.error)
        if self.logprobs:
            extra["logprobs"] = msgspec.to_builtins(self.logprobs)
        return extra | {
            "id": accepted.id if accepted else None,
            "text": "".join(self.texts),
            "tokens": self.ids,
            "reason": self.end.reason if self.end else "error",
            "usage": msgspec.to_builtins(self.end.usage)
            if self.end
            else {
                "prompt_tokens": accepted.prompt_tokens if accepted else None,
                "cached_tokens": accepted.cached_tokens if accepted else None,
                "completion_tokens": len(self.ids),
            },
            "timings_ms": {
                "queue": timings.queue if timings else None,
                "prefill": timings.prefill if timings else None,
                "ttft": self.ttft_ms,
                "handoff": msgspec.to_builtins(timings.handoff) if timings else None,
                "decode": timings.decode if timings else None,
                "total": timings.total if timings else None,
            },
        }


def _describe(error: ProtocolError | RequestError) -> dict[str, object]:
    """Return what a program needs to decide whether to ask again."""
    return {
        "code": error.code,
        "message": str(error),
        "retryable": error.retryable,
        "retry_after_ms": getattr(error, "retry_after_ms", 0),
    }


def _finish(received: _Received, *, as_json: bool) -> None:
    """End the output: the whole object, or the newline that ends the text."""
    if as_json:
        _show(json.dumps(received.as_json(), ensure_ascii=False) + "\n")
    elif received.texts or received.end:
        _show("\n")


@dataclass(slots=True)
class _Interrupt:
    was_seen: bool = False


@contextmanager
def _cancelled_by_interrupt(stream: AnswerStream, interrupt: _Interrupt) -> Iterator[None]:
    """Let the first Ctrl-C cancel the answer, and the second one raise KeyboardInterrupt.

    CANCEL is sent from the handler itself: raising in the middle of a read could lose tokens
    that had arrived.
    """

    def on_interrupt(_signum: int, _frame: FrameType | None) -> None:
        if interrupt.was_seen:
            raise KeyboardInterrupt
        interrupt.was_seen = True
        stream.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
