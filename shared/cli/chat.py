"""`kvpair chat`: several turns with the model.  Answers on stdout, everything else on stderr.

In a terminal, lines are edited and remembered, Ctrl-C stops the answer and not the chat, and a
failed turn leaves everything as it was before it.  In a pipe every line is a turn, and the first
failure ends the command with its exit code.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click

from protocol.client import Client
from protocol.errors import ProtocolError, RequestError
from protocol.messages import End, Tokens
from shared.cli.answer_options import AnswerFlags, answer_options
from shared.cli.answering import Interrupt, cancelled_by_interrupt, show
from shared.cli.conversation import MAX_FILE_BYTES, Conversation, ConversationError
from shared.cli.line_reader import LineReader
from shared.cli.losses import telling_policy
from shared.cli.parameters import FILE_NAME, TEXT
from shared.cli.received import Received
from shared.cli.words import counted
from shared.config.paths import client_socket
from shared.errors import ExitCode, KvpairError, UsageError

COMMANDS = {
    "/reset": "forget every turn",
    "/system [TEXT]": "set the system message, which stays; without TEXT, take it away",
    "/save FILE": "write the conversation to a file",
    "/load FILE": "go on with a conversation from a file",
    "/stats": "say what was used so far",
    "/help": "say this",
    "/quit": "end, as Ctrl-D does",
}

LOAD_HELP = "Go on with a saved conversation."

SAVED_MODE = 0o600
"""A conversation is its user's."""


@click.command
@click.option("--system", type=TEXT, metavar="TEXT", help="Begin with this system message.")
@click.option("--load", "load_file", type=FILE_NAME, metavar="FILE", help=LOAD_HELP)
@answer_options
@click.option("--quiet", "-q", is_flag=True, help="Do not tell usage and speed after each answer.")
@click.option(
    "--socket", type=FILE_NAME, metavar="PATH", help="prefilld's socket; else KVPAIR_SOCKET."
)
def chat(
    answer: AnswerFlags,
    *,
    system: str | None,
    load_file: str | None,
    quiet: bool,
    socket: str | None,
) -> ExitCode:
    """Talk with the model, turn by turn.

    In a terminal "/help" lists what else can be said.  In a pipe every line is a turn.
    """
    answer.check_alone()
    client = Client(client_socket(os.environ, chosen=socket), resume_policy=telling_policy())
    session = Session(client, answer, is_quiet=quiet)
    if load_file is not None:
        try:
            session.load(load_file)
        except KvpairError as error:  # on the command line it is a fault of that
            raise UsageError(error.message, hint=error.hint) from error
    if system is not None:
        session.conversation.system = system
    lines = LineReader()
    if lines.is_terminal:
        model = client.status().get("model", "")  # also: whether anybody is there at all
        _say(f"{model}; /help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
    try:
        return _talk(session, lines)
    finally:
        lines.close()


def _talk(session: Session, lines: LineReader) -> ExitCode:
    while True:
        try:
            line = lines.read()
        except UsageError as error:  # it is no text
            if not lines.is_terminal:
                raise
            _say(str(error))
            continue
        except KeyboardInterrupt:
            if not lines.is_terminal:
                raise
            click.echo(err=True)  # the line that was typed so far is dropped
            continue
        if line is None:
            if lines.is_terminal:
                click.echo(err=True)
            return ExitCode.OK
        try:
            if not session.take(line):
                return ExitCode.OK
        except (KvpairError, ProtocolError, RequestError) as error:
            if not lines.is_terminal:
                raise
            _say(" ".join(str(error).split()))
        except KeyboardInterrupt:  # the second one: the answer is left without its end
            if not lines.is_terminal:
                raise
            _say("left the answer")
        if session.was_interrupted and not lines.is_terminal:
            return ExitCode.INTERRUPTED


class Session:
    """One chat.

    Args:
        client: Whom to ask.
        answer: What answers are wanted.
        is_quiet: Tell nothing after an answer.
    """

    def __init__(self, client: Client, answer: AnswerFlags, *, is_quiet: bool) -> None:
        self.conversation = Conversation()
        self.was_interrupted = False
        """Whether the last answer was stopped by Ctrl-C."""
        self._client, self._answer, self._is_quiet = client, answer, is_quiet
        self._num_answers = self._num_tokens = self._context_tokens = 0
        self._decode_s = 0.0

    def take(self, line: str) -> bool:
        """Do what a line says; return whether the chat goes on.

        Raises:
            KvpairError: A command cannot be carried out.
            ProtocolError: The daemon went away or broke the rules.
            RequestError: The daemon refused the question.
        """
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        match word:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                for command, meaning in COMMANDS.items():
                    _say(f"{command:<16} {meaning}")
            case "/reset":
                self.conversation.reset()
                _say("forgot every turn")
            case "/system":
                self.conversation.system = rest or None
                _say("the system message is set" if rest else "no system message any more")
            case "/save":
                self._save(rest)
            case "/load":
                self.load(rest)
            case "/stats":
                _say(self._stats())
            case _ if word.startswith("/") and word[1:].isalpha():
                raise KvpairError(f"there is no command {word}", hint="/help lists them")
            case _:
                self._ask(line)
        return True

    def load(self, name: str) -> None:
        """Go on with the conversation in a file.

        Raises:
            KvpairError: There is none.
        """
        path = _path(name, "/load FILE")
        try:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            if len(data) > MAX_FILE_BYTES:
                raise KvpairError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
            self.conversation = Conversation.from_json(data)
        except OSError as error:
            raise KvpairError(f"{path} cannot be read: {error.strerror}") from error
        except ConversationError as error:
            raise KvpairError(f"{path} {error}") from error
        _say(f"read {counted(len(self.conversation.turns) // 2, 'turn')} from {path}")

    def _save(self, name: str) -> None:
        path = _path(name, "/save FILE")
        try:
            path.touch(mode=SAVED_MODE)
            path.write_text(self.conversation.to_json(), encoding="utf-8")
        except OSError as error:
            raise KvpairError(f"{path} cannot be written: {error.strerror}") from error
        _say(f"wrote {counted(len(self.conversation.turns) // 2, 'turn')} to {path}")

    def _ask(self, question: str) -> None:
        """Ask, show the answer, and add both to the conversation, also what came of a stopped one.

        A question that got nothing is not added.
        """
        received, interrupt = Received(began_s=time.monotonic()), Interrupt()
        messages = self.conversation.asking(question)
        try:
            with (
                self._client.stream(messages, **self._answer.options()) as stream,
                cancelled_by_interrupt(stream, interrupt),
            ):
                for event in stream:
                    received.add(event, now_s=time.monotonic())
                    if isinstance(event, Tokens):
                        show(event.text)
        finally:
            self.was_interrupted = interrupt.was_seen
            if received.texts:
                show("\n")
                if received.end is not None or interrupt.was_seen:
                    self.conversation.take(question, "".join(received.texts))
        if received.end is not None:
            self._count(received.end)
            if not self._is_quiet:
                _say(_usage(received, received.end))

    def _count(self, end: End) -> None:
        self._num_answers += 1
        self._num_tokens += end.usage.completion_tokens
        self._context_tokens = end.usage.prompt_tokens + end.usage.completion_tokens
        self._decode_s += end.timings_ms.decode / 1e3

    def _stats(self) -> str:
        speed = self._num_tokens / self._decode_s if self._decode_s else 0.0
        return (
            f"{counted(self._num_answers, 'answer')}, {self._num_tokens} tokens in all, "
            f"{speed:.1f} tokens/s on average; "
            f"the conversation has {counted(len(self.conversation.turns) // 2, 'turn')}, "
            f"{self._context_tokens} tokens at the last answer"
        )


def _usage(received: Received, end: End) -> str:
    """Return one line on what an answer took."""
    usage, decode_s = end.usage, end.timings_ms.decode / 1e3
    parts = [f"{usage.prompt_tokens} prompt tokens"]
    if usage.cached_tokens:
        parts[0] += f" ({usage.cached_tokens} cached)"
    parts.append(f"{usage.completion_tokens} in the answer")
    if received.ttft_ms is not None:
        parts.append(f"first after {received.ttft_ms / 1e3:.2f} s")
    if usage.completion_tokens > 1 and decode_s > 0:
        parts.append(f"{(usage.completion_tokens - 1) / decode_s:.1f} tokens/s")
    if end.reason != "stop":
        parts.append({"length": "ended by its length", "cancelled": "stopped"}[end.reason])
    return ", ".join(parts)


def _path(name: str, usage: str) -> Path:
    if not name:
        raise KvpairError(f"no file is named: {usage}")
    return Path(name).expanduser()


def _say(text: str) -> None:
    click.echo(f"kvpair: {text}", err=True)
