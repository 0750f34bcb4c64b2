"""`kvpair generate --file` against a daemon that follows a script."""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from protocol.messages import Accepted, End, Error, Generate, Timings, Tokens, Usage
from tests.support.typed_terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.unit.shared.cli.conftest import Kvpair, Peer, Serve

ACCEPTED = Accepted(id="r1", seed=7, prompt_tokens=3, cached_tokens=0, fingerprint="f")
END = End(
    reason="stop",
    usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=1),
    timings_ms=Timings(queue=0, prefill=0, decode=0, total=0),
)


class Upper:
    """Answers a text in capitals."""

    def __init__(self) -> None:
        self.asked: list[Generate] = []

    def __call__(self, peer: Peer) -> None:
        request = peer.receive()
        assert isinstance(request, Generate)
        self.asked.append(request)
        self.answer(peer, str(request.prompt))

    def answer(self, peer: Peer, prompt: str) -> None:
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text=prompt.upper()), END)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", "a", "b", "c")


def write(path: Path, *bodies: object) -> Path:
    path.write_text("".join(json.dumps(body) + "\n" for body in bodies))
    return path


def texts(path: Path) -> dict[int, Any]:
    entries: Sequence[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({entry["line"] for entry in entries}) == len(entries), "each line once"
    return {entry["line"]: entry.get("text") for entry in entries}


def test_every_line_is_answered_by_its_number(serve: Serve, kvpair: Kvpair, prompts: Path) -> None:
    """With the flags as what lines leave out; the report is on stderr."""
    script = Upper()
    serve(script)
    out = prompts.with_name("out.jsonl")
    arguments = [f"--file={prompts}", f"--output={out}", "--concurrency=2", "--max-tokens=5"]
    code, output, errors = kvpair("generate", *arguments)
    assert (code, output) == (0, "")
    assert errors == "kvpair: 3 of 3 lines answered\n"
    assert texts(out) == {1: "A", 2: "B", 3: "C"}
    assert {request.max_tokens for request in script.asked} == {5}
    first = json.loads(out.read_text().splitlines()[0])
    assert (first["reason"], first["tokens"]) == ("stop", [10])
    assert first["usage"]["prompt_tokens"] == 3


def test_a_run_goes_on_where_it_stopped(serve: Serve, kvpair: Kvpair, prompts: Path) -> None:
    """Only what has no answer is asked, also where the last line was torn by a crash."""
    script = Upper()
    serve(script)
    out = prompts.with_name("out.jsonl")
    arguments = ["generate", f"--file={prompts}", f"--output={out}"]
    assert kvpair(*arguments)[0] == 0
    whole = out.read_text().splitlines(keepends=True)
    out.write_text(whole[0] + whole[1] + whole[2][:20])
    script.asked.clear()
    code, _, errors = kvpair(*arguments)
    assert (code, errors) == (0, "kvpair: 3 of 3 lines answered, 2 of them before\n")
    assert len(script.asked) == 1
    assert texts(out) == {1: "A", 2: "B", 3: "C"}


def test_a_broken_line_is_named_and_the_rest_done(
    serve: Serve, kvpair: Kvpair, tmp_path: Path
) -> None:
    """The command fails in the end, and a mended file is gone on with."""
    serve(Upper())
    prompts = tmp_path / "p"
    prompts.write_text('"a"\n{"prompt": "b", "max_tokens": 0}\nnonsense\n"d"\n')
    out = tmp_path / "out"
    arguments = ["generate", f"--file={prompts}", f"--output={out}", "--concurrency=1"]
    code, _, errors = kvpair(*arguments)
    assert code == 1
    assert f"{prompts}: line 2: generate: " in errors
    assert f"{prompts}: line 3: no JSON" in errors
    assert "2 of 4 lines answered" in errors
    assert texts(out) == {1: "A", 2: None, 3: None, 4: "D"}
    prompts.write_text('"a"\n"b"\n"c"\n"d"\n')
    assert kvpair(*arguments)[0] == 0
    assert texts(out) == {1: "A", 2: "B", 3: "C", 4: "D"}


def test_a_full_daemon_is_asked_again(serve: Serve, kvpair: Kvpair, prompts: Path) -> None:
    class Full(Upper):
        def answer(self, peer: Peer, prompt: str) -> None:
            if len(self.asked) <= 2:
                peer.send(Error(code="busy", message="later", retryable=True, retry_after_ms=1))
            else:
                super().answer(peer, prompt)

    script = Full()
    serve(script)
    code, output, _ = kvpair("generate", f"--file={prompts}")
    assert code == 0
    assert {json.loads(line)["text"] for line in output.splitlines()} == {"A", "B", "C"}
    assert len(script.asked) == 5


def test_a_refused_line_is_an_error_of_its_own(serve: Serve, kvpair: Kvpair, prompts: Path) -> None:
    class Picky(Upper):
        def answer(self, peer: Peer, prompt: str) -> None:
            if prompt == "b":
                peer.send(Error(code="too-large", message="shorten it", retryable=False))
            else:
                super().answer(peer, prompt)

    serve(Picky())
    code, output, errors = kvpair("generate", f"--file={prompts}")
    assert code == 1
    assert "line 2: shorten it" in errors
    entries = {entry["line"]: entry for entry in map(json.loads, output.splitlines())}
    assert entries[2]["error"]["code"] == "too-large"
    assert entries[3]["text"] == "C"


def test_without_a_daemon_the_first_line_ends_the_run(kvpair: Kvpair, prompts: Path) -> None:
    """A failure for every line would be one and the same."""
    for more in ([], [f"--output={prompts.with_name('out')}"]):
        code, output, errors = kvpair("generate", f"--file={prompts}", "--concurrency=3", *more)
        assert (code, output) == (69, "")
        assert errors.startswith("kvpair: no socket at ")
        assert errors.count("\n") == 1


def test_ctrl_c_leaves_a_file_that_is_gone_on_with(
    serve: Serve, kvpair: Kvpair, prompts: Path
) -> None:
    """What was answered is kept; what ran is cancelled by its connection's end."""
    is_asked, may_end = threading.Event(), threading.Event()

    class Slow(Upper):
        def answer(self, peer: Peer, prompt: str) -> None:
            if prompt == "b" and not may_end.is_set():
                peer.send(ACCEPTED)
                is_asked.set()
                with suppress(ConnectionResetError):
                    assert peer.receive() is None, "the connection ends"
                may_end.set()
            else:
                super().answer(peer, prompt)

    serve(Slow())
    out = prompts.with_name("out.jsonl")
    arguments = ["generate", f"--file={prompts}", f"--output={out}", "--concurrency=1"]
    with kvpair.start(*arguments) as process:
        assert is_asked.wait(30)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped after 1 of 3 lines; the same command goes on" in errors
    assert texts(out) == {1: "A"}
    assert may_end.wait(30)
    assert kvpair(*arguments)[0] == 0
    assert texts(out) == {1: "A", 2: "B", 3: "C"}


def test_a_terminal_shows_a_bar(serve: Serve, kvpair: Kvpair, prompts: Path) -> None:
    serve(Upper())
    program = [sys.executable, "-c", "from shared.cli.main import main; main()"]
    out = prompts.with_name("out.jsonl")
    arguments = ["generate", f"--file={prompts}", f"--output={out}"]
    with Terminal([*program, *arguments], kvpair.environ) as terminal:
        terminal.read_until("3/3")
        terminal.read_until("3 of 3 lines answered")
        assert terminal.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--output=x", "p"], "--output and --concurrency go with --file"),
        (["--concurrency=2", "p"], "--output and --concurrency go with --file"),
        (["--file=x", "p"], "--file takes prompts and system messages from its lines"),
        (["--file=x", "--json"], "--file takes prompts and system messages from its lines"),
        (["--file=x", "--concurrency=0"], "--concurrency"),
        (["--file=x", "--concurrency=257"], "--concurrency"),
        (["--file=/nowhere/x"], "/nowhere/x cannot be read: No such file or directory"),
        (["--file={prompts}", "--output=/nowhere/x"], "/nowhere/x cannot be written: No such"),
        (["--file={prompts}", "--output={folder}"], "cannot be written: Is a directory"),
    ],
)
def test_wrong_flags_are_named(
    kvpair: Kvpair, prompts: Path, arguments: list[str], fault: str
) -> None:
    filled = [text.format(prompts=prompts, folder=prompts.parent) for text in arguments]
    code, output, errors = kvpair("generate", *filled)
    assert (code, output) == (2, "")
    assert fault in " ".join(errors.split())
