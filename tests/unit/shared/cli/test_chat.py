"""`kvpair chat` against a daemon that follows a script: in a pipe, and in a real terminal."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from protocol.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    End,
    Error,
    Generate,
    Message,
    Sampling,
    Status,
    StatusRequest,
    Timings,
    Tokens,
    Usage,
)
from tests.support.typed_terminal import CTRL_C, CTRL_D, ENTER, LEFT, UP, Terminal

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Kvpair, Peer, Serve

ACCEPTED = Accepted(id="r1", seed=7, prompt_tokens=3, cached_tokens=0, fingerprint="f")


def end(reason: str = "stop", *, completion_tokens: int = 2) -> End:
    return End(
        reason=reason,
        usage=Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=completion_tokens),
        timings_ms=Timings(queue=1.0, prefill=2.0, decode=100.0, total=6.5),
    )


class Echo:
    """Answers every question with its number and text, and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[Generate] = []

    def __call__(self, peer: Peer) -> None:
        request = peer.receive()
        if isinstance(request, StatusRequest):
            peer.send(Status(status={"state": "serving", "model": "tiny"}))
            return
        assert isinstance(request, Generate)
        self.requests.append(request)
        peer.send(*self.answer(request))

    def answer(self, request: Generate) -> list[Message]:
        text = f"{len(self.requests)}: {self.turns(-1)[-1][1]}"
        return [ACCEPTED, Tokens(index=0, ids=[10, 11], text=text), end()]

    def turns(self, index: int) -> list[tuple[str, str]]:
        """Return what was asked with a request, as (role, content)."""
        prompt = self.requests[index].prompt
        return [(m.role, m.content) for m in prompt if isinstance(m, ChatMessage)]


@pytest.fixture
def echo(serve: Serve) -> Echo:
    script = Echo()
    serve(script)
    return script


@pytest.fixture
def terminal(kvpair: Kvpair, tmp_path: Path) -> Terminal:
    program = [sys.executable, "-c", "from shared.cli.main import main; main()", "chat"]
    return Terminal(program, {**kvpair.environ, "XDG_STATE_HOME": str(tmp_path)})


# --- in a pipe -------------------------------------------------------------------------------


def test_every_line_of_a_pipe_is_a_turn(echo: Echo, kvpair: Kvpair) -> None:
    """Answers on stdout, usage and speed on stderr; each turn knows those before."""
    code, output, errors = kvpair("chat", "--system=S", text="one\ntwo\n\n")
    assert (code, output) == (0, "1: one\n2: two\n")
    usage = "kvpair: 3 prompt tokens (1 cached), 2 in the answer, first after "
    assert errors.count(usage) == 2
    assert errors.count(" s, 10.0 tokens/s\n") == 2
    assert echo.turns(1) == [
        ("system", "S"),
        ("user", "one"),
        ("assistant", "1: one"),
        ("user", "two"),
    ]


def test_flags_reach_the_daemon_and_quiet_is_quiet(echo: Echo, kvpair: Kvpair) -> None:
    arguments = "--temperature=0.5 --seed=3 --max-tokens=9 --min-tokens=2 --stop=x -q"
    assert kvpair("chat", *arguments.split(), text="hi") == (0, "1: hi\n", "")
    (request,) = echo.requests
    assert request.sampling == Sampling(temperature=0.5, seed=3)
    assert (request.max_tokens, request.min_tokens, request.stop) == (9, 2, ["x"])


def test_commands_change_the_conversation(echo: Echo, kvpair: Kvpair) -> None:
    text = "a\n/system Be brief.\nb\n/reset\nc\n/system\nd\n/stats\n/quit\nnever asked\n"
    code, output, errors = kvpair("chat", "-q", text=text)
    assert (code, output) == (0, "1: a\n2: b\n3: c\n4: d\n")
    assert echo.turns(1)[0] == ("system", "Be brief.")
    assert echo.turns(2) == [("system", "Be brief."), ("user", "c")]
    assert [role for role, _ in echo.turns(3)] == ["user", "assistant", "user"]
    assert "4 answers, 8 tokens in all, 20.0 tokens/s on average; " in errors
    assert "2 turns, 5 tokens at the last answer" in errors


def test_a_saved_conversation_is_gone_on_with(echo: Echo, kvpair: Kvpair, tmp_path: Path) -> None:
    """By flag or by command, and readable by its user alone."""
    file = tmp_path / "talk.json"
    assert kvpair("chat", "--system=S", text=f"a\n/save {file}\n")[0] == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert len(json.loads(file.read_text())["messages"]) == 3
    kvpair("chat", f"--load={file}", text="b\n")
    kvpair("chat", text=f"x\n/load {file}\nb\n")
    said = [("system", "S"), ("user", "a"), ("assistant", "1: a"), ("user", "b")]
    assert echo.turns(1) == said
    assert echo.turns(3) == said


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("/dance", "there is no command /dance; /help lists them"),
        ("/save", "no file is named: /save FILE"),
        ("/load", "no file is named: /load FILE"),
        ("/load /nowhere/at/all", "cannot be read: No such file or directory"),
        ("/load /dev/null", "/dev/null is no JSON"),
        ("/save /nowhere/at/all", "cannot be written: No such file or directory"),
    ],
)
def test_a_command_that_fails_ends_a_pipe_with_its_reason(
    echo: Echo, kvpair: Kvpair, line: str, fault: str
) -> None:
    code, output, errors = kvpair("chat", text=f"{line}\nnever asked\n")
    assert (code, output) == (1, "")
    assert fault in errors
    assert not echo.requests


def test_a_path_is_no_command(echo: Echo, kvpair: Kvpair) -> None:
    """Only a slash and one word are."""
    assert kvpair("chat", "-q", text="/usr/bin is what?\n")[1] == "1: /usr/bin is what?\n"


def test_a_refused_turn_ends_a_pipe_with_its_code(serve: Serve, kvpair: Kvpair) -> None:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(Error(code="busy", message="later", retryable=True))

    serve(script)
    code, output, errors = kvpair("chat", text="a\nb\n")
    assert (code, output) == (75, "")
    assert "later" in errors


def test_nobody_there_is_told_at_once(kvpair: Kvpair) -> None:
    assert kvpair("chat", text="a\n")[0] == 69


@pytest.mark.parametrize("arguments", [["--top-p=0"], ["--load"], ["--temperature=nan"], ["extra"]])
def test_wrong_flags_are_named(kvpair: Kvpair, arguments: list[str]) -> None:
    code, output, errors = kvpair("chat", *arguments, text="")
    assert (code, output) == (2, "")
    assert arguments[0].partition("=")[0].lstrip("-") in errors


@pytest.mark.parametrize("utf8_mode", ["0", "1"])
def test_a_line_that_is_no_text_is_named(echo: Echo, kvpair: Kvpair, utf8_mode: str) -> None:
    with kvpair.start("chat", PYTHONUTF8=utf8_mode, LC_ALL="C.UTF-8") as process:
        assert process.stdin is not None
        process.stdin.buffer.write(b"\xff\n")
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 2
    assert "a line on stdin is not UTF-8" in errors
    assert not echo.requests


def test_ctrl_c_ends_a_pipe(serve: Serve, kvpair: Kvpair) -> None:
    """There is nobody who could ask the next question."""

    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Once"))
        assert isinstance(peer.receive(), Cancel)
        peer.send(end("cancelled", completion_tokens=1))

    serve(script)
    with kvpair.start("chat", "-q") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("a\nb\n")
        process.stdin.flush()
        assert process.stdout.read(4) == "Once"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("\n", "")
    assert process.returncode == 130


# --- in a terminal ---------------------------------------------------------------------------


def test_a_terminal_shows_turns_edits_lines_and_remembers_them(
    echo: Echo, terminal: Terminal, tmp_path: Path
) -> None:
    """The left arrow moves the cursor, the up arrow brings the last line back."""
    with terminal:
        assert "tiny; /help lists commands" in terminal.read_until("> ")
        terminal.type(f"helo{LEFT}l{ENTER}")
        terminal.read_until("1: hello")
        assert "10.0 tokens/s" in terminal.read_until("> ")
        terminal.type(f"{UP}!{ENTER}")
        terminal.read_until("2: hello!")
        terminal.read_until("> ")
        terminal.type(f"two\\{ENTER}")
        terminal.read_until("… ")
        terminal.type(f"lines{ENTER}")
        terminal.read_until("3: two")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert [echo.turns(index)[-1][1] for index in range(3)] == ["hello", "hello!", "two\nlines"]
    history = tmp_path / "kvpair" / "chat_history"
    assert "hello!" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600


def test_ctrl_c_stops_the_answer_and_not_the_chat(serve: Serve, terminal: Terminal) -> None:
    """What came of it stays in the conversation; at the prompt, Ctrl-C drops the line."""
    cancelled = threading.Event()

    class Slow(Echo):
        def __call__(self, peer: Peer) -> None:
            if self.requests:
                super().__call__(peer)
                return
            request = peer.receive()
            if not isinstance(request, Generate):
                peer.send(Status(status={"state": "serving", "model": "tiny"}))
                return
            self.requests.append(request)
            peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Once upon"))
            assert isinstance(peer.receive(), Cancel)
            cancelled.set()
            peer.send(end("cancelled", completion_tokens=1))

    script = Slow()
    serve(script)
    with terminal:
        terminal.read_until("> ")
        terminal.type(f"tell{ENTER}")
        terminal.read_until("Once upon")
        terminal.type(CTRL_C)
        assert "stopped" in terminal.read_until("> ")
        assert cancelled.is_set()
        terminal.type("half a line")
        terminal.read_until("half a line")  # it is being edited; a key before would be early
        terminal.type(CTRL_C)
        terminal.read_until("> ")
        terminal.type(f"go on{ENTER}")
        terminal.read_until("2: go on")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert script.turns(1) == [
        ("user", "tell"),
        ("assistant", "Once upon"),
        ("user", "go on"),
    ]


def test_a_failed_turn_changes_nothing_in_a_terminal(serve: Serve, terminal: Terminal) -> None:
    """The user sees why and asks again; the conversation has no half turn."""

    class Busy(Echo):
        def answer(self, request: Generate) -> list[Message]:
            if len(self.requests) == 1:
                return [Error(code="too-large", message="shorten it", retryable=False)]
            return super().answer(request)

    script = Busy()
    serve(script)
    with terminal:
        terminal.read_until("> ")
        terminal.type(f"long{ENTER}")
        assert "shorten it" in terminal.read_until("> ")
        terminal.type(f"/nonsense{ENTER}")
        assert "there is no command /nonsense" in terminal.read_until("> ")
        terminal.type(f"short{ENTER}")
        terminal.read_until("2: short")
        terminal.type(f"/quit{ENTER}")
        assert terminal.wait() == 0
    assert script.turns(1) == [("user", "short")]


def test_a_line_that_is_no_text_is_dropped_in_a_terminal(
    echo: Echo, kvpair: Kvpair, tmp_path: Path
) -> None:
    """What a paste from a file in another encoding does to one line must not end the chat.

    Where lines are edited, the editor drops such bytes itself; so stdout is a file here.
    """
    answers = tmp_path / "answers"
    program = [sys.executable, "-c", "from shared.cli.main import main; main()", "chat"]
    shell = ["sh", "-c", f"exec {shlex.join(program)} > {answers}"]
    with Terminal(shell, {**kvpair.environ, "LC_ALL": "C.UTF-8"}) as terminal:
        terminal.read_until("> ")
        terminal.type_bytes(b"caf\xe9\r")
        assert "a line on stdin is not UTF-8" in terminal.read_until("> ")
        terminal.type(f"well{ENTER}")
        terminal.read_until("tokens/s")
        terminal.read_until("> ")
        terminal.type(CTRL_D)
        assert terminal.wait() == 0
    assert answers.read_text() == "1: well\n"
    assert len(echo.requests) == 1


def test_a_terminal_without_a_daemon_is_told_before_the_prompt(terminal: Terminal) -> None:
    with terminal:
        assert terminal.wait() == 69
        assert "> " not in terminal.unread


def test_chat_imports_nothing_heavy(kvpair: Kvpair) -> None:
    """It starts as fast as the rest of the command."""
    program = (
        "import sys; import shared.cli.chat; "
        "print(sorted({'torch', 'numpy', 'asyncio', 'rich', 'structlog'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=kvpair.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == "[]\n"
