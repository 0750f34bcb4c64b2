"""`kvpair bench` against daemons that follow a script."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protocol.messages import (
    Accepted,
    Check,
    Checked,
    End,
    Error,
    Generate,
    HandoffTimings,
    Message,
    Status,
    StatusRequest,
    Timings,
    Tokens,
    Usage,
)
from tests.support.typed_terminal import Terminal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.shared.cli.conftest import Kvpair, Peer, Serve

VOCAB_SIZE = 5000
QUICK = ["--requests=3", "--warmup=0", "--answer-tokens=3"]
BUSY = Error(code="busy", message="come back", retryable=True, retry_after_ms=5)


class Prefilld:
    """Answers STATUS and CHECK, and each GENERATE with as many tokens as it asks for."""

    def __init__(self, **status: object) -> None:
        self.status = {
            "state": "serving", "version": "1.2.3", "model": "m", "device": "cuda:0",
            "fingerprint": "f", "vocab_size": VOCAB_SIZE, "decoded_socket": None,
        } | status  # fmt: skip
        self.fits = True
        self.asked: list[Generate] = []

    def __call__(self, peer: Peer) -> None:
        match peer.receive():
            case StatusRequest():
                peer.send(Status(status=self.status))
            case Check():
                counts = {"prompt_tokens": 1, "max_tokens": 1, "blocks": 1, "total_blocks": 1}
                peer.send(Checked(fits=self.fits, **counts))
            case Generate() as request:
                self.asked.append(request)
                with suppress(ConnectionError):
                    self.answer(peer, request)

    def answer(self, peer: Peer, request: Generate) -> None:
        """Send a whole answer."""
        peer.send(accepted(request), *tokens(request.max_tokens or 0), end(request))


def accepted(request: Generate) -> Message:
    return Accepted(
        id=request.id or "r",
        seed=1,
        prompt_tokens=len(request.prompt),
        cached_tokens=0,
        fingerprint="f",
    )


def tokens(count: int) -> Iterator[Message]:
    return (Tokens(index=index, ids=[7], text="x") for index in range(count))


def end(request: Generate) -> Message:
    stages = HandoffTimings(ready=0.1, adopted=0.2, copy_start=0.3, copy_done=0.4, first_step=0.5)
    return End(
        reason="length",
        usage=Usage(
            prompt_tokens=len(request.prompt),
            cached_tokens=0,
            completion_tokens=request.max_tokens or 0,
        ),
        timings_ms=Timings(
            queue=1,
            prefill=2,
            decode=3,
            total=6,
            first_token_ns=time.monotonic_ns(),
            handoff=stages,
        ),
    )


def decoded(peer: Peer) -> None:
    peer.receive()
    link = {"access": "pull", "access_because": "two GPUs", "bandwidth_gb_s": 371.5}
    peer.send(Status(status={"state": "serving", "device": "cuda:1", "link": link}))


def serve_pair(serve: Serve, prefilld: Prefilld) -> Prefilld:
    serve(prefilld)
    serve(decoded, name="decoded")
    return prefilld


def bench_json(kvpair: Kvpair, *arguments: str) -> tuple[int, dict[str, Any], str]:
    code, output, errors = kvpair("bench", "--json", *arguments)
    return code, json.loads(output), errors


def test_one_object_tells_what_was_asked_and_what_came(serve: Serve, kvpair: Kvpair) -> None:
    prefilld = serve_pair(serve, Prefilld())
    code, told, errors = bench_json(
        kvpair, "--requests=5", "--warmup=2", "--prompt-tokens=20-30", "--answer-tokens=4",
        "--concurrency=2", "--shared-prefix=8", "--seed=9", "--ttft-slo-ms=60000",
        "--itl-slo-ms=60000",
    )  # fmt: skip
    assert (code, errors) == (0, "")
    assert told["pair"] == {
        "model": "m",
        "version": "1.2.3",
        "fingerprint": "f",
        "prefilld_device": "cuda:0",
        "decoded_device": "cuda:1",
        "access": "pull",
        "access_because": "two GPUs",
        "bandwidth_gb_s": 371.5,
    }
    assert (told["num_prompts"], told["num_warmups"], told["seed"]) == (5, 2, 9)
    assert (told["max_concurrency"], told["request_rate"]) == (2, "inf")
    assert (told["prompt_tokens"], told["answer_tokens"]) == ([20, 30], [4, 4])
    assert (told["completed"], told["failed"], told["cut"], told["stopped_by"]) == (5, 0, 0, None)
    measured = prefilld.asked[2:]
    assert told["total_input_tokens"] == sum(len(request.prompt) for request in measured)
    assert told["total_output_tokens"] == 20
    assert told["slo_attainment"] == 1
    assert told["request_goodput"] == told["request_throughput"]
    assert told["request_throughput"] == pytest.approx(5 / told["duration"], rel=0.01)
    assert told["max_ttft_ms"] >= told["p99_ttft_ms"] >= told["median_ttft_ms"] > 0
    assert told["stages_ms"]["first_step"]["median"] == 0.5
    prompts = [tuple(request.prompt) for request in prefilld.asked]
    assert len({prompt[:8] for prompt in prompts}) == 1
    assert len({prompt[8:20] for prompt in prompts}) == 7
    assert all(request.ignore_eos and request.max_tokens == 4 for request in prefilld.asked)


def test_people_get_a_table(serve: Serve, kvpair: Kvpair) -> None:
    serve_pair(serve, Prefilld())
    code, output, errors = kvpair("bench", *QUICK, "--rate=1000", "--itl-slo-ms=60000")
    assert (code, errors) == (0, "")
    assert "model m, version 1.2.3, access pull, prefilld on cuda:0, decoded on cuda:1" in output
    assert "3 requests, 1000 a second; prompts of 128 tokens, answers of 3" in output
    assert "3 answered, 0 failed, 0 cut" in output
    assert "within 60000 ms between any two tokens: 3 of 3 answers" in output
    first_words = [line.split("  ")[0].strip() for line in output.splitlines()]
    for row in ("time to first token", "first token to second", "between tokens", "sent late"):
        assert row in first_words
    assert "hand-over: first step" in first_words


def test_a_terminal_shows_a_bar(serve: Serve, kvpair: Kvpair) -> None:
    serve_pair(serve, Prefilld())
    program = [sys.executable, "-c", "from shared.cli.main import main; main()"]
    with Terminal([*program, "bench", *QUICK], kvpair.environ) as terminal:
        terminal.read_until("3/3")
        terminal.read_until("whole answer")
        assert terminal.wait() == 0


def test_failures_are_counted_by_code_and_told_once(serve: Serve, kvpair: Kvpair) -> None:
    """A daemon that hangs up at once is one as well; it has no code of its own."""

    class Failing(Prefilld):
        def answer(self, peer: Peer, request: Generate) -> None:
            match len(self.asked):
                case 1 | 3:
                    peer.send(BUSY)
                case 2:
                    peer.send(Error(code="too-large", message="shorten it", retryable=False))
                case _:
                    super().answer(peer, request)

    serve_pair(serve, Failing())
    code, told, errors = bench_json(kvpair, *QUICK, "--requests=5", "--concurrency=1")
    assert code == 1
    assert told["failures"] == {"busy": 2, "too-large": 1}
    assert (told["completed"], told["failed"]) == (2, 3)
    assert errors.splitlines() == [
        "kvpair: 2 requests failed with busy: come back",
        "kvpair: 1 request failed with too-large: shorten it",
    ]


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_pair_that_is_full_is_one_to_come_back_to(
    serve: Serve, kvpair: Kvpair, warmup: int
) -> None:
    """Whether it says so at once or to all that is measured."""

    class Full(Prefilld):
        def answer(self, peer: Peer, request: Generate) -> None:
            peer.send(BUSY)

    serve_pair(serve, Full())
    code, output, errors = kvpair("bench", *QUICK, f"--warmup={warmup}")
    assert code == 75
    assert "busy: come back" in errors
    assert ("nothing was measured" in errors) == (warmup == 1) == (not output)


class Stuck(Prefilld):
    """Answers the first request and begins all others without ending them."""

    def __init__(self) -> None:
        super().__init__()
        self.is_stuck = threading.Event()
        self.has_hung_up = threading.Event()

    def answer(self, peer: Peer, request: Generate) -> None:
        if len(self.asked) == 1:
            super().answer(peer, request)
            return
        peer.send(accepted(request), *tokens(2))
        self.is_stuck.set()
        with suppress(ConnectionResetError):
            assert peer.receive() is None, "the connection ends"
        self.has_hung_up.set()


def test_what_runs_when_time_is_up_is_cut_and_the_rest_is_shown(
    serve: Serve, kvpair: Kvpair
) -> None:
    prefilld = serve_pair(serve, Stuck())
    code, told, errors = bench_json(kvpair, *QUICK, "--concurrency=1", "--time-limit=2")
    assert code == 0
    assert (told["completed"], told["cut"], told["stopped_by"]) == (1, 1, "time-limit")
    assert told["total_output_tokens"] == 5
    assert errors == (
        "kvpair: stopped after 2 s: 1 answer cut, 1 request not sent; the figures are of what came "
        "until then (--time-limit)\n"
    )
    assert prefilld.has_hung_up.wait(30)


def test_a_time_limit_within_which_nothing_is_answered_is_a_failure(
    serve: Serve, kvpair: Kvpair
) -> None:
    prefilld = Stuck()
    prefilld.asked.append(Generate(prompt=[1]))  # so that none is the first
    serve_pair(serve, prefilld)
    for warmup, said in (
        (1, "nothing was measured, the warm-up took more than 1 s"),
        (0, "0 failed, 4 cut"),
    ):
        code, output, errors = kvpair("bench", "--time-limit=1", f"--warmup={warmup}")
        assert code == 1
        assert said in output + errors


def test_ctrl_c_shows_what_came_until_then(serve: Serve, kvpair: Kvpair) -> None:
    """As in a terminal, which tells every process of the command."""
    prefilld = serve_pair(serve, Stuck())
    with kvpair.start("bench", "--json", *QUICK, "--concurrency=1") as process:
        assert prefilld.is_stuck.wait(30)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children
        for pid in (*map(int, children), process.pid):
            os.kill(pid, signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    told = json.loads(output)
    assert (told["completed"], told["cut"], told["stopped_by"]) == (1, 1, "interrupt")
    assert errors.startswith("kvpair: interrupted: 1 answer cut, 1 request not sent")
    assert prefilld.has_hung_up.wait(30)


def test_clients_do_not_outlive_the_command(serve: Serve, kvpair: Kvpair) -> None:
    """Killed, it tells nobody anything; its clients must not ask on for ever."""
    prefilld = serve_pair(serve, Stuck())
    with kvpair.start("bench", *QUICK, "--concurrency=1") as process:
        assert prefilld.is_stuck.wait(30)
        process.kill()
    assert prefilld.has_hung_up.wait(30)


def test_a_broken_answer_is_gone_on_with_and_told(serve: Serve, kvpair: Kvpair) -> None:
    class Breaking(Prefilld):
        def answer(self, peer: Peer, request: Generate) -> None:
            if request.resume is None:
                peer.send(accepted(request), *tokens(2))
                return
            rest = Tokens(index=2, ids=[7], text="x")
            peer.send(accepted(request), rest, end(request))

    serve_pair(serve, Breaking())
    code, told, errors = bench_json(kvpair, *QUICK, "--requests=1")
    assert (code, told["completed"], told["resumptions"]) == (0, 1, 1)
    assert "answers broke off and were resumed 1 time" in errors


def test_without_a_daemon_nothing_is_begun(serve: Serve, kvpair: Kvpair) -> None:
    """A prefilld alone is no pair: the answer would wait for the other half."""
    code, output, errors = kvpair("bench")
    assert (code, output) == (69, "")
    assert errors.startswith("kvpair: no socket at ")
    serve(Prefilld())
    code, _, errors = kvpair("bench")
    assert code == 69
    assert "decoded.sock" in errors


@pytest.mark.parametrize("state", ["loading", "waiting-for-peer", "draining"])
def test_a_pair_that_does_not_serve_is_one_to_come_back_to(
    serve: Serve, kvpair: Kvpair, state: str
) -> None:
    serve_pair(serve, Prefilld(state=state, vocab_size=None))
    code, _, errors = kvpair("bench")
    assert code == 75
    assert f"prefilld does not serve, it is {state}" in errors
    assert "kvpair up -- kvpair bench" in errors


def test_what_does_not_fit_is_refused_before_it_is_asked(serve: Serve, kvpair: Kvpair) -> None:
    prefilld = Prefilld()
    prefilld.fits = False
    serve_pair(serve, prefilld)
    code, output, errors = kvpair("bench", "--prompt-tokens=10-9000")
    assert (code, output, prefilld.asked) == (1, "", [])
    assert "a prompt of 9,000 tokens with an answer of 32 is too large" in errors


def test_an_older_daemon_is_named(serve: Serve, kvpair: Kvpair) -> None:
    serve_pair(serve, Prefilld(vocab_size=None))
    code, _, errors = kvpair("bench")
    assert code == 1
    assert "prefilld, version 1.2.3, does not tell its vocabulary; restart both" in errors


def test_decoded_is_not_taken_for_prefilld(serve: Serve, kvpair: Kvpair, socket_path: Path) -> None:
    """Their sockets lie side by side, and their STATUS looks alike."""
    serve(decoded)
    code, output, errors = kvpair("bench")
    assert (code, output) == (2, "")
    assert f"it is not prefilld that listens on {socket_path}" in errors


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--prompt-tokens=30-20"], "30-20 goes down; put the smaller number first"),
        (["--shared-prefix=21", "--prompt-tokens=20-30"], "--shared-prefix 21 is longer than"),
        (["--rate=0"], "--rate"),
        (["--time-limit=0"], "--time-limit"),
        (["--requests=0"], "--requests"),
    ],
)
def test_wrong_flags_are_named(kvpair: Kvpair, arguments: list[str], fault: str) -> None:
    code, output, errors = kvpair("bench", *arguments)
    assert (code, output) == (2, "")
    assert fault in " ".join(errors.split())
