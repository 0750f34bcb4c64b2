"""`kvpair generate` against a daemon that follows a script."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from protocol.messages import (
    Accepted,
    Cancel,
    ChatMessage,
    DeviceTimings,
    End,
    Error,
    Generate,
    HandoffTimings,
    LogitBias,
    Message,
    Sampling,
    Timings,
    TokenLogprob,
    Tokens,
    Usage,
)

ACCEPTED = Accepted(id="r1", seed=7, prompt_tokens=3, cached_tokens=0, fingerprint="f")
HANDOFF = HandoffTimings(ready=0.1, adopted=0.2, copy_start=0.0, copy_done=0.5, first_step=0.9)
DEVICE = DeviceTimings(prefill=1.9, pull=0.5, last_pull=0.3)


def end(reason: str = "stop", completion_tokens: int = 2) -> End:
    return End(
        reason=reason,
        usage=Usage(prompt_tokens=3, cached_tokens=0, completion_tokens=completion_tokens),
        timings_ms=Timings(
            queue=1.0, prefill=2.0, decode=3.0, total=6.5, handoff=HANDOFF, device=DEVICE
        ),
    )


def read(process: subprocess.Popen[str], num_characters: int) -> str:
    """Return what has come to stdout so far."""
    assert process.stdout is not None
    return process.stdout.read(num_characters)


def errors_of(process: subprocess.Popen[str]) -> str:
    """Return all that comes to stderr."""
    assert process.stderr is not None
    return process.stderr.read()


class Answering:
    """A script that answers with these messages and keeps what it was asked."""

    def __init__(self, *messages: Message) -> None:
        self.messages = messages
        self.request: Generate | None = None

    def __call__(self, peer: Peer) -> None:
        request = peer.receive()
        assert isinstance(request, Generate)
        self.request = request
        peer.send(*self.messages)


PARIS = (
    ACCEPTED,
    Tokens(index=0, ids=[10], text="Paris"),
    Tokens(index=1, ids=[11], text=" é."),
    end(),
)

if TYPE_CHECKING:
    from tests.unit.shared.cli.conftest import Kvpair, Peer, Script, Serve


def test_the_answer_is_on_stdout_and_nothing_else_is(serve: Serve, kvpair: Kvpair) -> None:
    script = Answering(*PARIS)
    serve(script)
    assert kvpair("generate", "What is the capital of France?") == (0, "Paris é.\n", "")
    assert script.request == Generate(
        prompt="What is the capital of France?", max_tokens=None, sampling=Sampling()
    )


def test_text_is_shown_as_it_comes(serve: Serve, kvpair: Kvpair) -> None:
    """A stream that shows itself only at its end is none."""
    may_go_on = threading.Event()

    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Paris"))
        may_go_on.wait(30)
        peer.send(end())

    serve(script)
    with kvpair.start("generate", "x") as process:
        assert read(process, 5) == "Paris"
        may_go_on.set()
        assert process.communicate(timeout=30) == ("\n", "")
    assert process.returncode == 0


def test_every_flag_reaches_the_daemon(serve: Serve, kvpair: Kvpair) -> None:
    script = Answering(*PARIS)
    serve(script)
    arguments = (
        "--max-tokens=5 --temperature=0.5 --top-k=3 --top-p=0.9 --seed=1 --stop=a --stop=b "
        "--ignore-eos --no-stream --system=S --min-tokens=4 --min-p=0.25 "
        "--repetition-penalty=1.5 --presence-penalty=0.5 --frequency-penalty=-0.5 "
        "--logit-bias=7=-1.5 --logit-bias=8=2 --json --logprobs=3"
    )
    assert kvpair("generate", *arguments.split(), "x")[0] == 0
    assert script.request == Generate(
        prompt=[ChatMessage(role="system", content="S"), ChatMessage(role="user", content="x")],
        max_tokens=5,
        min_tokens=4,
        sampling=Sampling(
            temperature=0.5,
            top_k=3,
            top_p=0.9,
            min_p=0.25,
            seed=1,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias=[LogitBias(id=7, bias=-1.5), LogitBias(id=8, bias=2.0)],
        ),
        stop=["a", "b"],
        logprobs=3,
        ignore_eos=True,
        stream=False,
    )


@pytest.mark.parametrize(
    ("arguments", "text", "prompt"),
    [
        (["-"], "from stdin\n", "from stdin"),
        ([], "two\nlines\n\n", "two\nlines\n"),
        (["--raw", "-"], "kept\n", "kept\n"),
    ],
)
def test_a_prompt_can_come_from_stdin(
    serve: Serve, kvpair: Kvpair, arguments: list[str], text: str, prompt: str
) -> None:
    """The newline that `echo` adds is no part of a prompt, but raw means raw."""
    script = Answering(*PARIS)
    serve(script)
    assert kvpair("generate", *arguments, text=text)[0] == 0
    assert script.request is not None
    assert script.request.prompt == prompt


def test_json_is_one_object_with_the_clients_ttft(serve: Serve, kvpair: Kvpair) -> None:
    script = Answering(*PARIS)
    serve(script)
    code, output, errors = kvpair("generate", "--json", "x")
    assert (code, errors) == (0, "")
    answer = json.loads(output)
    assert 0 < answer["timings_ms"].pop("ttft") < 30_000
    assert answer == {
        "id": "r1",
        "text": "Paris é.",
        "tokens": [10, 11],
        "reason": "stop",
        "usage": {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 2},
        "timings_ms": {
            "queue": 1.0,
            "prefill": 2.0,
            "handoff": {
                "ready": 0.1,
                "adopted": 0.2,
                "copy_start": 0.0,
                "copy_done": 0.5,
                "first_step": 0.9,
            },
            "decode": 3.0,
            "total": 6.5,
            "device": {"prefill": 1.9, "pull": 0.5, "last_pull": 0.3, "first_step": None},
        },
    }
    assert script.request is not None
    assert script.request.stream, "without a stream the first token's time could not be seen"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("busy", 75), ("draining", 75), ("too-large", 1), ("internal", 1)],
)
def test_an_error_is_one_line_and_an_exit_code(
    serve: Serve, kvpair: Kvpair, code: str, exit_code: int
) -> None:
    """75 tells a script to come back later; 1 tells it not to."""
    serve(Answering(Error(code=code, message="the fault\nin full", retryable=False)))
    assert kvpair("generate", "x") == (exit_code, "", "kvpair: the fault in full\n")


class BreakingOff:
    """A script that gives one token a connection and hangs up, until it ends the answer.

    Args:
        num_losses: Connections that break off.
        is_preempted: They say so, since the answer has to make room for others.
    """

    def __init__(self, *, num_losses: int, is_preempted: bool = False) -> None:
        self.num_losses, self.is_preempted = num_losses, is_preempted
        self.resumes: list[list[int]] = []

    def __call__(self, peer: Peer) -> None:
        request = peer.receive()
        assert isinstance(request, Generate)
        had = request.resume.ids if request.resume else []
        if request.resume:
            self.resumes.append(had)
        index = len(had)
        text = "Paris"[index]
        peer.send(ACCEPTED, Tokens(index=index, ids=[10 + index], text=text))
        if index == self.num_losses:
            peer.send(end(completion_tokens=index + 1))
        elif self.is_preempted:
            peer.send(Error(code="preempted", message="others first", retryable=True))


def notes(*num_tokens: int) -> str:
    return "".join(
        f"kvpair: a daemon went away after {number} tokens; resuming (attempt {attempt} of 3)\n"
        for attempt, number in enumerate(num_tokens, 1)
    )


def test_an_answer_that_makes_room_for_others_goes_on(serve: Serve, kvpair: Kvpair) -> None:
    """More often than daemons may die; the user learns that none did."""
    serve(BreakingOff(num_losses=4, is_preempted=True))
    code, out, err = kvpair("generate", "x")
    assert (code, out) == (0, "Paris\n")
    assert err.splitlines()[3] == (
        "kvpair: the answer made room for others after 4 tokens; resuming (attempt 4 of 16)"
    )


def test_an_answer_that_breaks_off_goes_on(serve: Serve, kvpair: Kvpair) -> None:
    """Its text is on stdout once, whole, and stderr tells why it stood still."""
    script = BreakingOff(num_losses=2)
    serve(script)
    assert kvpair("generate", "x") == (0, "Par\n", notes(1, 2))
    assert script.resumes == [[10], [10, 11]]


def test_json_of_an_answer_that_broke_off_is_that_of_a_whole_one(
    serve: Serve, kvpair: Kvpair
) -> None:
    serve(BreakingOff(num_losses=1))
    code, output, errors = kvpair("generate", "--json", "x")
    assert (code, errors) == (0, notes(1))
    answer = json.loads(output)
    assert (answer["text"], answer["tokens"], answer["reason"]) == ("Pa", [10, 11], "stop")


def test_an_answer_that_breaks_off_too_often_says_so(serve: Serve, kvpair: Kvpair) -> None:
    """What had arrived stays on stdout, on a line of its own."""
    serve(BreakingOff(num_losses=9))
    code, output, errors = kvpair("generate", "x")
    assert (code, output) == (1, "Pari\n")
    told = errors.removeprefix(notes(1, 2, 3))
    assert told.startswith("kvpair: the daemon went away before the answer was whole")
    assert told.count("\n") == 1


def test_json_of_an_answer_that_stays_broken_makes_nothing_up(serve: Serve, kvpair: Kvpair) -> None:
    serve(BreakingOff(num_losses=9))
    code, output, _ = kvpair("generate", "--json", "x")
    assert code == 1
    answer = json.loads(output)
    assert (answer["reason"], answer["text"]) == ("error", "Pari")
    assert answer["tokens"] == [10, 11, 12, 13]
    assert answer["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "completion_tokens": 4}
    assert answer["timings_ms"]["total"] is None


def test_an_interrupt_ends_the_wait_for_a_daemon(serve: Serve, kvpair: Kvpair) -> None:
    """The user has seen the note and does not want to wait for a minute."""
    hung_up = threading.Event()

    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Paris"))
        assert hung_up.wait(30)

    daemon = serve(script)
    with kvpair.start("generate", "x") as process:
        assert read(process, 5) == "Paris"
        daemon.stop_listening()
        hung_up.set()
        assert process.stderr is not None
        assert "resuming" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (output, errors) == ("\n", "kvpair: cancelled after 1 tokens\n")
    assert process.returncode == 130


def cancelling(after_cancel: Script) -> Script:
    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Paris"))
        assert isinstance(peer.receive(), Cancel)
        after_cancel(peer)

    return script


def test_an_interrupt_cancels_and_takes_what_was_computed(serve: Serve, kvpair: Kvpair) -> None:
    serve(
        cancelling(lambda peer: peer.send(Tokens(index=1, ids=[11], text=" is"), end("cancelled")))
    )
    with kvpair.start("generate", "x") as process:
        assert read(process, 5) == "Paris"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (output, errors) == (" is\n", "kvpair: cancelled after 2 tokens\n")
    assert process.returncode == 130


def test_a_second_interrupt_does_not_wait_for_the_daemon(serve: Serve, kvpair: Kvpair) -> None:
    """A daemon that hangs must not hold the terminal."""
    was_cancelled, may_end = threading.Event(), threading.Event()

    def hang(_peer: Peer) -> None:
        was_cancelled.set()
        may_end.wait(30)

    serve(cancelling(hang))
    with kvpair.start("generate", "x") as process:
        assert read(process, 5) == "Paris"
        process.send_signal(signal.SIGINT)
        assert was_cancelled.wait(30)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        may_end.set()
        assert "Traceback" not in errors_of(process)


def test_a_reader_that_has_seen_enough_is_no_error(serve: Serve, kvpair: Kvpair) -> None:
    """`kvpair generate … | head -1` must not end in a traceback."""
    hung_up = threading.Event()

    def script(peer: Peer) -> None:
        peer.receive()
        peer.send(ACCEPTED, Tokens(index=0, ids=[10], text="Paris"))
        assert hung_up.wait(30)
        with suppress(ConnectionError):  # it may be gone before it has seen the end
            peer.send(Tokens(index=1, ids=[11], text=" is"), end())

    serve(script)
    with kvpair.start("generate", "x") as process:
        assert read(process, 5) == "Paris"
        assert process.stdout is not None
        process.stdout.close()
        hung_up.set()
        assert errors_of(process) == ""
        assert process.wait(30) == 1


def test_a_locale_without_the_character_shows_a_question_mark(serve: Serve, kvpair: Kvpair) -> None:
    serve(Answering(*PARIS))
    code, output, errors = kvpair("generate", "x", PYTHONIOENCODING="ascii")
    assert (code, output, errors) == (0, "Paris ?.\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--raw", "--system=x", "x"], 2, "--system needs the chat template"),
        (["--max-tokens=many", "x"], 2, "'many' is not a valid integer"),
        (["--temperature=nan", "x"], 2, "--temperature"),
        (["--temperature=inf", "x"], 2, "--temperature"),
        (["--temperature=-1", "x"], 2, "--temperature"),
        (["--max-tokens=0", "x"], 2, "--max-tokens"),
        (["--top-p=0", "x"], 2, "--top-p"),
        (["--top-k=-1", "x"], 2, "--top-k"),
        (["--seed=-1", "x"], 2, "--seed"),
        (["--stop=", "x"], 2, "--stop"),
        ([f"--stop={'a' * 1025}", "x"], 2, "at most 1024 characters"),
        ([*(f"--stop={i}" for i in range(17)), "x"], 2, "--stop is given 17 times; 16 is the most"),
        (["--min-p=1.5", "x"], 2, "--min-p"),
        (["--min-p=nan", "x"], 2, "--min-p"),
        (["--repetition-penalty=0", "x"], 2, "--repetition-penalty"),
        (["--presence-penalty=101", "x"], 2, "--presence-penalty"),
        (["--frequency-penalty=-101", "x"], 2, "--frequency-penalty"),
        (["--frequency-penalty=nan", "x"], 2, "nan is not a number"),
        (["--logit-bias=7", "x"], 2, "--logit-bias '7' is no ID=BIAS"),
        (["--logit-bias=a=1", "x"], 2, "--logit-bias 'a=1' is no ID=BIAS"),
        (["--logit-bias=-1=1", "x"], 2, "the id must be from 0 to 2147483647"),
        (["--logit-bias=1=nan", "x"], 2, "the bias must be from -100 to 100"),
        (["--logit-bias=1=101", "x"], 2, "the bias must be from -100 to 100"),
        (["--logit-bias=1=1", "--logit-bias=1=2", "x"], 2, "--logit-bias names a token twice"),
        (["--min-tokens=5", "--max-tokens=4", "x"], 2, "--min-tokens 5 is above --max-tokens 4"),
        (["--logprobs=21", "--json", "x"], 2, "--logprobs"),
        (["--logprobs=2", "x"], 2, "--logprobs is told with --json only"),
        ([""], 2, "the prompt is empty"),
        (["x"], 69, "no socket at"),
        (["--socket=/" + "x" * 107, "x"], 78, "has 108 bytes, and the kernel takes at most 107"),
    ],
)
def test_what_cannot_be_asked_is_one_line(
    kvpair: Kvpair, arguments: list[str], code: int, message: str
) -> None:
    exit_code, output, errors = kvpair("generate", *arguments)
    assert (exit_code, output) == (code, "")
    assert message in errors
    assert "Traceback" not in errors
    if code != 2:
        assert errors.startswith("kvpair: ")
        assert errors.count("\n") == 1


def test_stdin_that_is_no_text_is_named(kvpair: Kvpair) -> None:
    code, output, errors = kvpair("generate", "-", text="ok\udcff")
    assert (code, output) == (2, "")
    assert errors == "kvpair: the prompt on stdin is not UTF-8 (byte 2)\n"


def test_json_tells_probabilities_where_they_were_asked_for(serve: Serve, kvpair: Kvpair) -> None:
    told = TokenLogprob(logprob=-0.5, top_ids=[10, 3], top_logprobs=[-0.5, -1.5])
    serve(Answering(ACCEPTED, Tokens(index=0, ids=[10], text="P", logprobs=[told]), end()))
    code, output, _ = kvpair("generate", "--json", "--logprobs=2", "x")
    assert code == 0
    assert json.loads(output)["logprobs"] == [
        {"logprob": -0.5, "top_ids": [10, 3], "top_logprobs": [-0.5, -1.5]}
    ]
