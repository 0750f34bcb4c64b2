"""Answers that go on when a daemon dies: the library, the command, and where resuming must end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from protocol.client import Client
from protocol.errors import ConnectionLostError, RequestError, UnixSocketError
from protocol.messages import End, Resume, Sampling, Tokens
from protocol.resuming import ResumePolicy
from tests.support.everyday import check_death_of_decoded
from tests.support.pair import START_TIMEOUT_S, DaemonName, Pair, wait_until
from tests.support.solo import SoloEngine
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.exchange import Options
    from shared.daemon.model_host import ModelHost

KVPAIR = Path(sys.executable).with_name("kvpair")
NUM_TOKENS = 400

ASKS = [
    Ask(
        prompt=tuple(2 + (7 * index + salt) % 250 for index in range(30 + salt)),
        max_tokens=NUM_TOKENS,
        sampling=Sampling(temperature=0.9 * (salt % 2), seed=salt),
    )
    for salt in range(4)
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    """Four prompt tokens a step, so that a long prompt is caught while it is computed."""
    settings = {"prefilld.token_budget": 4, "decoded.num_blocks": 1100}
    with Pair(tmp_path_factory.mktemp("r"), model=tiny_model, settings=settings) as running:
        yield running


@pytest.fixture(autouse=True)
def revived(pair: Pair) -> Iterator[None]:
    """Every test ends with both daemons up and every block free."""
    yield
    for name in ("prefilld", "decoded"):
        if pair.process(name).poll() is not None:
            pair.start(name)
    pair.wait_serving()
    pair.wait_settled()


def num_running(pair: Pair) -> int:
    return int(pair.decoded_status()["sequences"]["running"])


def test_answers_are_whole_and_unchanged_when_decoded_dies(
    pair: Pair, tiny_host: ModelHost
) -> None:
    """Greedy ones and ones drawn by chance: ids, text, and what END counts."""
    check_death_of_decoded(pair, SoloEngine(tiny_host), ASKS)


def test_an_unstreamed_answer_is_computed_again(pair: Pair) -> None:
    """Nothing of it was delivered, so all of it comes, and once."""
    how = Sampling(temperature=1, seed=3)
    ask: Options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "sampling": how}
    undisturbed = pair.client.generate([5, 6], **ask)
    with pair.client.stream([5, 6], stream=False, **ask) as stream:
        next(stream)
        wait_until(lambda: num_running(pair) == 1, what="it runs")
        pair.kill("decoded")
        pair.start("decoded")
        tokens, end = stream
    assert isinstance(tokens, Tokens)
    assert isinstance(end, End)
    assert (tuple(tokens.ids), tokens.text) == (undisturbed.ids, undisturbed.text)


@pytest.mark.parametrize("leaves_its_socket", [True, False])
def test_a_prompt_that_dies_with_prefilld_is_taken_to_the_next_one(
    pair: Pair, *, leaves_its_socket: bool
) -> None:
    """Which is not there yet: nobody listens behind its socket, or there is none."""
    ask = Ask(prompt=tuple(range(2 + leaves_its_socket, 202)), max_tokens=20)
    before = pair.counter("prefilld", "kvpair_chunks_announced_total")
    with WatchedStreams(pair.socket, [ask]) as streams:
        wait_until(
            lambda: pair.counter("prefilld", "kvpair_chunks_announced_total") > before + 2,
            what="the prompt is being computed",
        )
        pair.kill("prefilld")
        if not leaves_its_socket:
            pair.socket.unlink()
        pair.start("prefilld")
        (delivered,) = streams.results()
    with WatchedStreams(pair.socket, [ask]) as streams:  # now: what is cached computes in no time
        (undisturbed,) = streams.results()
    assert delivered.ids == undisturbed.ids
    assert len(delivered.losses) == 1


def test_a_prefilld_that_was_started_again_serves_at_once(pair: Pair) -> None:
    """While decoded still streams, and holds the mapping of, what the dead one handed over."""
    # Long enough, and enough of them, to take several times as long as a daemon's start.
    old = [Ask(prompt=(5, 6 + number), max_tokens=4_000) for number in range(4)]
    with WatchedStreams(pair.socket, old) as streams:
        wait_until(lambda: num_running(pair) == len(old), what="they run")
        pair.kill("prefilld")
        pair.restart("prefilld")
        assert len(pair.client.generate([7, 8], max_tokens=20, ignore_eos=True).ids) == 20
        wait_until(lambda: num_running(pair) == len(old), timeout_s=1, what="the old ones go on")
        results = streams.results()
    for delivered in results:
        assert delivered.losses == []
        assert len(delivered.ids) == 4_000


def die_under(pair: Pair, request_id: str, resume: Resume | None) -> Resume:
    """Kill decoded while it has the request; return what its client would come back with."""
    client = Client(pair.socket, resume_policy=ResumePolicy(max_attempts=0))
    with client.stream(
        [5, 6], id=request_id, max_tokens=4_000, ignore_eos=True, resume=resume
    ) as stream:
        wait_until(lambda: num_running(pair) == 1, what="it runs")
        pair.kill("decoded")
        with pytest.raises(ConnectionLostError, match="delivered") as caught:
            list(stream)
    assert caught.value.resume is not None
    pair.restart("decoded")
    return caught.value.resume


def test_a_request_that_decoded_dies_of_twice_is_not_served_again(pair: Pair) -> None:
    """Whether its client has gone on or begins anew; others are served."""
    resume = die_under(pair, "bad", None)
    resume = die_under(pair, "bad", resume)
    assert resume.attempt == 2
    for again in (resume, None):
        with pytest.raises(RequestError, match="decoded died 2 times") as caught:
            pair.client.generate([5, 6], id="bad", max_tokens=4_000, resume=again)
        assert (caught.value.code, caught.value.retryable) == ("poisoned", False)
    assert len(pair.client.generate([5, 6], max_tokens=5, ignore_eos=True).ids) == 5


def num_drains(pair: Pair) -> int:
    return sum(line["event"] == "drain.started" for line in pair.log("decoded"))


def test_a_restart_that_was_announced_is_held_against_nobody(pair: Pair) -> None:
    """Three upgrades in the life of one answer, each in more haste than the answer has."""

    def start_the_next(_loss: object) -> None:
        pair.process("decoded").wait(timeout=10)
        pair.start("decoded")

    client = Client(pair.socket, resume_policy=ResumePolicy(on_loss=start_the_next))
    ids: list[int] = []
    upgrade_at = [100, 200, 300]
    with client.stream([5, 6], max_tokens=3_000, ignore_eos=True) as stream:
        for event in stream:
            ids += event.ids if isinstance(event, Tokens) else []
            if upgrade_at and len(ids) >= upgrade_at[0]:
                del upgrade_at[0]
                before = num_drains(pair)
                pair.signal("decoded", signal.SIGTERM)
                wait_until(lambda seen=before: num_drains(pair) > seen, what="decoded drains")
                pair.signal("decoded", signal.SIGTERM)
    assert upgrade_at == []
    assert len(ids) == 3_000


def test_the_rest_of_another_models_answer_is_refused(pair: Pair) -> None:
    """A pair that was started again with another model cannot go on with the old one's answer."""
    resume = Resume(attempt=1, seed=1, fingerprint="another", ids=[5])
    with pytest.raises(RequestError, match="ask again from the start") as caught:
        pair.client.generate([5, 6], resume=resume)
    assert caught.value.code == "model-changed"


# --- as a user has it --------------------------------------------------------------------------


@pytest.fixture
def up(tmp_path: Path, tiny_model: Path) -> Iterator[dict[str, str]]:
    """`kvpair up` in a terminal of its own; yields the environment of other terminals."""
    environ = os.environ | {"KVPAIR_SOCKET": str(tmp_path / "prefilld.sock")}
    flags = [f"--set=model.path={tiny_model}", "--set=decoded.num_blocks=300"]
    process = subprocess.Popen([KVPAIR, "up", *flags], env=environ, stderr=subprocess.DEVNULL)
    try:
        wait_until(
            lambda: pid_of("prefilld", environ) and pid_of("decoded", environ),
            timeout_s=START_TIMEOUT_S,
            what="the pair serves",
        )
        yield environ
    finally:
        process.terminate()
        process.wait(timeout=30)


def pid_of(name: DaemonName, environ: dict[str, str]) -> int | None:
    """Return a serving daemon's process."""
    try:
        status = Client(Path(environ["KVPAIR_SOCKET"]).with_name(f"{name}.sock")).status()
    except UnixSocketError:
        return None
    return int(str(status["pid"])) if status["state"] == "serving" else None


def test_the_command_goes_on_under_a_supervisor(up: dict[str, str]) -> None:
    """Each character once on stdout, one line on stderr, and exit code 0."""
    command = [KVPAIR, "generate", "--max-tokens=1500", "--ignore-eos", "hello"]
    undisturbed = subprocess.run(command, env=up, capture_output=True, check=True, text=True)
    with subprocess.Popen(
        command, env=up, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        begun = process.stdout.read(200)
        pid = pid_of("decoded", up)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        rest, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert begun + rest == undisturbed.stdout
    assert errors.startswith("kvpair: a daemon went away after ")
    assert errors.endswith("resuming (attempt 1 of 3)\n")
    assert errors.count("\n") == 1
