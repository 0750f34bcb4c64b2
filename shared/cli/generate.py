"""`kvpair generate`: one prompt, one answer.  Text on stdout as it comes, all else on stderr.

Ctrl-C asks the daemon to stop and still takes what it had computed; a second one leaves at once.
An answer that breaks off because a daemon died goes on once it can, and a line on stderr says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import click

from protocol.client import Client
from protocol.errors import ConnectionLostError, ProtocolError, RequestError
from protocol.exchange import Options, Prompt
from protocol.limits import MAX_TOP_LOGPROBS
from protocol.messages import ChatMessage, Tokens
from shared.cli.answer_options import AnswerFlags, answer_options
from shared.cli.answering import Interrupt, cancelled_by_interrupt, show
from shared.cli.generate_file import DEFAULT_CONCURRENCY, MAX_CONCURRENCY, generate_file
from shared.cli.losses import telling_policy
from shared.cli.parameters import FILE_NAME, TEXT
from shared.cli.received import Received
from shared.config.paths import client_socket
from shared.errors import ExitCode, UsageError

MAX_PROMPT_BYTES = 64 << 20
"""Most that is read from stdin; no daemon can be configured to take more."""

FILE_HELP = "Answer every line of this JSON-lines file."
OUTPUT_HELP = "With --file: where answers go; else stdout."


@click.command
@click.argument("prompt", type=TEXT, required=False)
@click.option("--raw", is_flag=True, help="Take the prompt as it is, without a chat template.")
@click.option("--system", type=TEXT, metavar="TEXT", help="Put a system message before the prompt.")
@answer_options
@click.option(
    "--logprobs",
    type=click.IntRange(0, MAX_TOP_LOGPROBS),
    metavar="N",
    help="With --json: tell how likely each token was, and the N likeliest.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, at the end.")
@click.option("--no-stream", is_flag=True, help="Print the answer at once when it is whole.")
@click.option("--file", type=FILE_NAME, metavar="FILE", help=FILE_HELP)
@click.option("--output", type=FILE_NAME, metavar="FILE", help=OUTPUT_HELP)
@click.option(
    "--concurrency",
    type=click.IntRange(1, MAX_CONCURRENCY),
    metavar="N",
    help=f"With --file: requests at a time [{DEFAULT_CONCURRENCY}].",
)
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def generate(
    answer: AnswerFlags,
    *,
    prompt: str | None,
    raw: bool,
    system: str | None,
    logprobs: int | None,
    as_json: bool,
    no_stream: bool,
    file: str | None,
    output: str | None,
    concurrency: int | None,
    socket: str | None,
) -> ExitCode:
    """Answer a prompt, or a file of them.

    PROMPT is the text; "-", or none where stdin is no terminal, reads it from stdin.

    A line of --file is a JSON string, or an object with "prompt", a text or a list of chat
    messages, and what else a request may say; a run that was interrupted goes on with the lines
    that --output does not answer.
    """
    if raw and system is not None:
        raise UsageError("--system needs the chat template that --raw leaves out")
    if file is None and (output is not None or concurrency is not None):
        raise UsageError("--output and --concurrency go with --file")
    if logprobs is not None and not as_json and file is None:
        raise UsageError("--logprobs is told with --json only")
    options: Options = {
        **answer.options(),
        "raw": raw,
        "stream": not no_stream,
        "logprobs": logprobs,
    }
    if file is not None:
        if prompt is not None or system is not None or as_json or no_stream:
            raise UsageError(
                "--file takes prompts and system messages from its lines, and writes JSON"
            )
        return generate_file(
            Client(client_socket(os.environ, chosen=socket)),
            options,
            prompts=Path(file),
            output=None if output is None else Path(output),
            concurrency=concurrency or DEFAULT_CONCURRENCY,
        )
    answer.check_alone()
    text = _read_prompt(prompt, keep_newline=raw)
    if not text:
        raise UsageError("the prompt is empty")
    client = Client(client_socket(os.environ, chosen=socket), resume_policy=telling_policy())
    received, interrupt = Received(began_s=time.monotonic()), Interrupt()
    try:
        with (
            client.stream(_with_system(text, system), **options) as stream,
            cancelled_by_interrupt(stream, interrupt),
        ):
            for event in stream:
                received.add(event, now_s=time.monotonic())
                if isinstance(event, Tokens) and not as_json:
                    show(event.text)
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


def _finish(received: Received, *, as_json: bool) -> None:
    """End the output: the whole object, or the newline that ends the text."""
    if as_json:
        show(json.dumps(received.as_json(), ensure_ascii=False) + "\n")
    elif received.texts or received.end:
        show("\n")
