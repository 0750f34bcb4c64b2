"""The pair when something dies, stops, vanishes or will not read: who notices, and who must not.

Requests are held in a phase by a small token budget, a long answer, or SIGSTOP to a daemon.
"""

from __future__ import annotations

import re
import resource
import signal
import struct
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from protocol import messages as wire
from protocol.client import Client
from protocol.errors import ConnectionLostError, RequestError
from protocol.resuming import DEFAULT_MAX_ATTEMPTS, ResumePolicy
from tests.support.pair import DAEMONS, DaemonName, Pair, wait_until
from tests.support.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.exchange import Answer

Ask = Callable[..., "Future[Answer]"]

LONG_PROMPT_TOKENS = 3_000
LONG_ANSWER_TOKENS = 1_000
FOUR = [5 + 17 * number for number in range(4)]


def prompt_of(num_tokens: int, salt: int = 0) -> list[int]:
    return [2 + (7 * index + salt) % 250 for index in range(num_tokens)]


UNCACHED = {"pool.prefix_cache": False}
"""Prompts are asked again here to be caught while they are computed, or over a ruined pool."""


SLOW_PREFILL: dict[str, object] = {
    "prefilld.token_budget": 4,
    "prefilld.max_running": 2,
    "decoded.max_batch": 4,
    "pool.num_blocks": 1024,
    "decoded.num_blocks": 1024,
} | UNCACHED


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("v"), model=tiny_model, settings=SLOW_PREFILL) as running:
        yield running


@pytest.fixture(scope="module")
def direct_pair(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    """One whose decoded reads prefilld's blocks where they are."""
    settings = {**SLOW_PREFILL, "pool.access": "direct"}
    with Pair(tmp_path_factory.mktemp("x"), model=tiny_model, settings=settings) as running:
        yield running


@pytest.fixture(params=["pair", "direct_pair"])
def each_pair(request: pytest.FixtureRequest) -> Pair:
    """Either kind of access: what a client leaves behind, and who reads it, differ."""
    shared: Pair = request.getfixturevalue(request.param)
    return shared


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a shared pair begins and ends with both daemons up and every block free."""
    names = {"pair", "direct_pair", "each_pair"}.intersection(request.fixturenames)
    shared: list[Pair] = [request.getfixturevalue(name) for name in names]
    yield
    for pair in shared:
        revive(pair)
        pair.wait_settled()


def revive(pair: Pair) -> None:
    for name in DAEMONS:
        pair.signal(name, signal.SIGCONT)
        if is_draining(pair, name):
            pair.process(name).wait(timeout=20)
        if pair.process(name).poll() is not None:
            pair.start(name)
    pair.wait_serving()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def asker(
    pair: Pair, threads: ThreadPoolExecutor, *, max_attempts: int = DEFAULT_MAX_ATTEMPTS
) -> Ask:
    policy = ResumePolicy(max_attempts=max_attempts)

    def ask(prompt: list[int], **options: Any) -> Future[Answer]:  # noqa: ANN401
        client = Client(pair.socket, timeout_s=60, resume_policy=policy)
        return threads.submit(client.generate, prompt, ignore_eos=True, **options)

    return ask


def open_request(pair: Pair, prompt: list[int], *, max_tokens: int) -> RawPeer:
    peer = RawPeer.connect(pair.socket)
    peer.send(wire.Generate(prompt=[*prompt], max_tokens=max_tokens, ignore_eos=True))
    assert isinstance(peer.receive(), wire.Accepted)
    return peer


def queue(pair: Pair, key: str) -> int:
    return int(pair.status()["queue"][key])


def blocks(pair: Pair, name: DaemonName, key: str) -> int:
    status = pair.status() if name == "prefilld" else pair.decoded_status()
    return int(status["pool"][key])


def num_running(pair: Pair) -> int:
    return int(pair.decoded_status()["sequences"]["running"])


def chunks_announced(pair: Pair) -> float:
    return pair.counter("prefilld", "kvpair_chunks_announced_total")


LEAVE: dict[str, Callable[[RawPeer], None]] = {
    "close": RawPeer.close,
    "half-close": RawPeer.finish_sending,
    "cancel": lambda peer: peer.send(wire.Cancel()),
}
every_way_to_leave = pytest.mark.parametrize("how", LEAVE)


def check_farewell(peer: RawPeer, how: str) -> None:
    """Check what a client that left is told: END where it asked for it, nothing otherwise."""
    if how == "close":
        return
    with peer:
        messages = [message for message in peer.rest() if not isinstance(message, wire.Tokens)]
    if how == "half-close":
        assert messages == []
    else:
        (end,) = messages
        assert isinstance(end, wire.End)
        assert end.reason == "cancelled"


# --- clients that go away ----------------------------------------------------------------------


@every_way_to_leave
def test_a_client_may_leave_while_it_waits_for_blocks(pair: Pair, how: str) -> None:
    running = [open_request(pair, prompt_of(LONG_PROMPT_TOKENS), max_tokens=4) for _ in range(2)]
    wait_until(lambda: queue(pair, "running") == 2, what="two prompts run")
    with open_request(pair, prompt_of(64), max_tokens=4) as waiting:
        wait_until(lambda: queue(pair, "waiting") == 1, what="the third waits")
        LEAVE[how](waiting)
        wait_until(lambda: queue(pair, "waiting") == 0, timeout_s=1, what="it waits no more")
        assert queue(pair, "running") == 2
        check_farewell(waiting, how)
    for peer in running:
        peer.close()


@every_way_to_leave
def test_a_client_may_leave_in_mid_prefill_with_chunks_under_way(pair: Pair, how: str) -> None:
    handoffs = pair.counter("prefilld", "kvpair_handoffs_sent_total")
    before = chunks_announced(pair)
    with open_request(pair, prompt_of(LONG_PROMPT_TOKENS), max_tokens=4) as peer:
        wait_until(lambda: chunks_announced(pair) > before + 3, what="chunks are under way")
        LEAVE[how](peer)
        check_farewell(peer, how)
        pair.wait_settled(timeout_s=1)
    assert pair.counter("prefilld", "kvpair_handoffs_sent_total") == handoffs


@every_way_to_leave
def test_a_client_may_leave_between_its_first_token_and_adoption(each_pair: Pair, how: str) -> None:
    each_pair.signal("decoded", signal.SIGSTOP)
    with open_request(each_pair, prompt_of(40), max_tokens=500) as peer:
        wait_until(lambda: queue(each_pair, "sent") == 1, what="HANDOFF is on its way")
        LEAVE[how](peer)
        each_pair.signal("decoded", signal.SIGCONT)
        check_farewell(peer, how)
        each_pair.wait_settled(timeout_s=2)


@every_way_to_leave
def test_a_client_may_leave_while_decoded_has_no_room_for_it(
    pair: Pair, threads: ThreadPoolExecutor, how: str
) -> None:
    ask = asker(pair, threads)
    answers = [ask(prompt_of(20, salt), max_tokens=LONG_ANSWER_TOKENS) for salt in FOUR]
    wait_until(lambda: num_running(pair) == 4, what="the batch is full")
    with open_request(pair, prompt_of(10), max_tokens=8) as peer:
        wait_until(lambda: queue(pair, "ready") == 1, what="the fifth waits for room")
        LEAVE[how](peer)
        wait_until(lambda: queue(pair, "ready") == 0, timeout_s=1, what="it waits no more")
        check_farewell(peer, how)
    assert {len(answer.result(timeout=60).ids) for answer in answers} == {LONG_ANSWER_TOKENS}


@every_way_to_leave
def test_a_client_may_leave_in_mid_answer(each_pair: Pair, how: str) -> None:
    with open_request(each_pair, prompt_of(40), max_tokens=4_000) as peer:
        wait_until(lambda: num_running(each_pair) == 1, what="it is decoded")
        LEAVE[how](peer)
        check_farewell(peer, how)
        each_pair.wait_settled(timeout_s=1)


def test_a_client_that_never_reads_holds_up_nobody_and_is_given_up(
    tmp_path: Path, tiny_model: Path
) -> None:
    settings = {"limits.client_stall_timeout_s": 1}
    with Pair(tmp_path, model=tiny_model, settings=settings) as pair:
        with open_request(pair, prompt_of(10), max_tokens=4_000) as stalled:
            wait_until(lambda: num_running(pair) == 1, what="it is decoded")
            for salt in range(5):
                answer = pair.client.generate(prompt_of(30, salt), max_tokens=50, ignore_eos=True)
                assert len(answer.ids) == 50
            pair.wait_settled(timeout_s=20)
            wait_until(
                lambda: any(line["event"] == "client.stalled" for line in pair.log("decoded")),
                timeout_s=20,
                what="the client that never reads was given up",
            )
            tokens = [message for message in stalled.rest() if isinstance(message, wire.Tokens)]
        assert sum(len(message.ids) for message in tokens) < 4_000
        assert len(pair.client.generate([5], max_tokens=3, ignore_eos=True).ids) == 3


# --- prefilld dies -----------------------------------------------------------------------------


def test_streams_finish_whole_when_prefilld_is_killed(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(pair, threads)
    prompts = [prompt_of(30 + salt, salt) for salt in FOUR]
    undisturbed = [
        answer.result(timeout=60).ids
        for answer in [ask(prompt, max_tokens=LONG_ANSWER_TOKENS) for prompt in prompts]
    ]
    epoch = pair.status()["epoch"]
    answers = [ask(prompt, max_tokens=LONG_ANSWER_TOKENS) for prompt in prompts]
    wait_until(lambda: num_running(pair) == 4, what="four streams run")
    pair.kill("prefilld")
    assert num_running(pair) == 4
    pair.start("prefilld")
    assert [answer.result(timeout=60).ids for answer in answers] == undisturbed
    pair.wait_serving()
    pair.wait_settled(timeout_s=1)
    assert pair.status()["epoch"] != epoch
    assert pair.decoded_status()["epoch"] == pair.status()["epoch"]


def test_half_announced_prompts_are_dropped_when_prefilld_is_killed(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    before = chunks_announced(pair)
    ask = asker(pair, threads, max_attempts=0)
    answer = ask(prompt_of(LONG_PROMPT_TOKENS), max_tokens=4)
    wait_until(lambda: chunks_announced(pair) > before + 2, what="chunks are under way")
    assert blocks(pair, "decoded", "free") < blocks(pair, "decoded", "total") - 1
    pair.kill("prefilld")
    with pytest.raises(ConnectionLostError, match="went away"):
        answer.result(timeout=10)
    wait_until(
        lambda: blocks(pair, "decoded", "free") == blocks(pair, "decoded", "total") - 1,
        timeout_s=1,
        what="decoded's reservation is dropped",
    )


def test_a_handoff_in_the_queue_of_a_killed_prefilld_ends_cleanly(
    each_pair: Pair, threads: ThreadPoolExecutor
) -> None:
    """It was never adopted, decoded being stopped; the client sees the end and may ask again."""
    each_pair.signal("decoded", signal.SIGSTOP)
    answer = asker(each_pair, threads, max_attempts=0)(prompt_of(40), max_tokens=100)
    wait_until(lambda: queue(each_pair, "sent") == 1, what="HANDOFF is on its way")
    each_pair.kill("prefilld")
    each_pair.signal("decoded", signal.SIGCONT)
    with pytest.raises(
        (ConnectionLostError, RequestError), match=r"went away|lost|revoked"
    ) as caught:
        answer.result(timeout=10)
    if isinstance(caught.value, RequestError):
        assert caught.value.code == "prefill-lost"
    assert isinstance(caught.value, ConnectionLostError | RequestError)
    assert caught.value.retryable


# --- decoded dies ------------------------------------------------------------------------------


def test_clients_hear_how_much_they_have_when_decoded_is_killed(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(pair, threads, max_attempts=0)
    prompts = [prompt_of(30 + salt, salt) for salt in FOUR]
    whole = [ask(prompt, max_tokens=LONG_ANSWER_TOKENS) for prompt in prompts]
    undisturbed = [answer.result(timeout=60).ids for answer in whole]
    steps = pair.counter("decoded", "kvpair_decode_steps_total")
    answers = [ask(prompt, max_tokens=LONG_ANSWER_TOKENS) for prompt in prompts]
    wait_until(lambda: pair.counter("decoded", "kvpair_decode_steps_total") > steps + 50)
    pair.kill("decoded")
    resumes = []
    for answer, ids in zip(answers, undisturbed, strict=True):
        with pytest.raises(ConnectionLostError, match="delivered") as caught:
            answer.result(timeout=10)
        error = caught.value
        assert error.resume is not None
        assert tuple(error.resume.ids) == ids[: error.num_tokens]
        resumes.append(error.resume)
    pair.restart("decoded")
    rests = [
        ask(prompt, max_tokens=LONG_ANSWER_TOKENS, resume=resume)
        for prompt, resume in zip(prompts, resumes, strict=True)
    ]
    for rest, resume, ids in zip(rests, resumes, undisturbed, strict=True):
        assert (*resume.ids, *rest.result(timeout=60).ids) == ids


def test_what_a_killed_decoded_was_lent_is_back_within_100_ms(pair: Pair) -> None:
    """Its process is gone, so nobody reads: no quarantine."""
    before = chunks_announced(pair)
    with open_request(pair, prompt_of(LONG_PROMPT_TOKENS), max_tokens=4):
        wait_until(lambda: chunks_announced(pair) > before + 5, what="chunks are under way")
        pair.signal("decoded", signal.SIGSTOP)
    wait_until(
        lambda: queue(pair, "running") == 0 and blocks(pair, "prefilld", "leased") > 0,
        what="the prompt's blocks wait for a RELEASE that cannot come",
    )
    num_lost = len(ends_of_the_link(pair))
    pair.kill("decoded")
    wait_until(
        lambda: [len(end) > 1 for end in ends_of_the_link(pair)[num_lost:]] == [True],
        what="the link is lost and the lease ended",
    )
    lost, *released = ends_of_the_link(pair)[-1]
    assert 0 <= seconds_between(lost, released[-1]) <= 0.1


def ends_of_the_link(pair: Pair) -> list[list[dict[str, Any]]]:
    """Return each loss of the link as logged, with the leases that ended after it."""
    ends: list[list[dict[str, Any]]] = []
    for line in pair.log("prefilld"):
        if line["event"] == "link.lost":
            ends.append([line])
        elif line["event"] == "lease.released" and ends:
            ends[-1].append(line)
    return ends


def seconds_between(earlier: dict[str, Any], later: dict[str, Any]) -> float:
    return (
        datetime.fromisoformat(later["timestamp"]) - datetime.fromisoformat(earlier["timestamp"])
    ).total_seconds()


def test_what_a_killed_decoded_had_not_adopted_goes_to_the_next_one(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    """Handed over, waiting for room, in prefill or queued: their clients see nothing of it."""
    ask = asker(pair, threads)
    prompts = [prompt_of(20, salt) for salt in FOUR] + [prompt_of(30), prompt_of(2_000)]
    undisturbed = [ask(prompt, max_tokens=30).result(timeout=60).ids for prompt in prompts]
    # Told in the same breath, but behind END: that there is room for four again.
    wait_until(lambda: num_running(pair) == 0, what="decoded has told its credits")
    pair.signal("decoded", signal.SIGSTOP)
    answers = [ask(prompt, max_tokens=30) for prompt in prompts[:4]]
    wait_until(lambda: queue(pair, "sent") == 4, what="four are handed over")
    answers += [ask(prompt, max_tokens=30) for prompt in prompts[4:]]
    wait_until(lambda: queue(pair, "ready") >= 1, what="one waits for room")
    pair.kill("decoded")
    pair.restart("decoded")
    assert [answer.result(timeout=60).ids for answer in answers] == undisturbed


# --- a daemon without descriptors ----------------------------------------------------------------


def test_a_decoded_out_of_descriptors_loses_no_client_and_burns_no_processor(
    each_pair: Pair, threads: ThreadPoolExecutor
) -> None:
    """The kernel drops the descriptor on its way (MSG_CTRUNC); the request waits its turn again."""
    pid = each_pair.process("decoded").pid
    before = rejections(each_pair)
    usual = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    in_use = {int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()}
    lowest_free = next(number for number in range(len(in_use) + 1) if number not in in_use)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, usual[1]))
    try:
        answer = asker(each_pair, threads)(prompt_of(20), max_tokens=20)
        wait_until(
            lambda: rejections(each_pair) > before, what="a HANDOFF arrived without descriptor"
        )
        until_s = each_pair.status()["uptime_s"] + 0.5
        wait_until(lambda: each_pair.status()["uptime_s"] > until_s, what="half a second passed")
        num_rejections = rejections(each_pair) - before
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, usual)
    assert len(answer.result(timeout=10).ids) == 20
    assert num_rejections < 100, "tried again and again without a pause"


def rejections(pair: Pair) -> float:
    return pair.counter("prefilld", 'kvpair_handoffs_returned_total{cause="fd-lost"}')


# --- a daemon that is stopped ------------------------------------------------------------------

QUARANTINE_S = 1.0


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    settings = {
        "link.ping_interval_s": 0.1,
        "link.ping_timeout_s": 0.6,
        "link.quarantine_s": QUARANTINE_S,
        "prefilld.token_budget": 4,
        "pool.num_blocks": 1024,
        "decoded.num_blocks": 1024,
    } | UNCACHED
    with Pair(tmp_path_factory.mktemp("w"), model=tiny_model, settings=settings) as running:
        yield running


def test_a_stopped_decoded_is_put_in_quarantine_and_taken_back(
    watched: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(watched, threads)
    undisturbed = ask(prompt_of(30), max_tokens=LONG_ANSWER_TOKENS).result(timeout=60).ids
    links = watched.counter("prefilld", "kvpair_links_opened_total")
    running = ask(prompt_of(30), max_tokens=LONG_ANSWER_TOKENS)
    wait_until(lambda: num_running(watched) == 1, what="one stream runs")
    before = chunks_announced(watched)
    with open_request(watched, prompt_of(LONG_PROMPT_TOKENS), max_tokens=4):
        wait_until(lambda: chunks_announced(watched) > before + 5, what="chunks are under way")
        watched.signal("decoded", signal.SIGSTOP)
    waiting = ask(prompt_of(50), max_tokens=20)
    wait_until(lambda: blocks(watched, "prefilld", "quarantined") > 0, what="quarantine began")
    assert watched.status()["link"]["state"] != "open"
    wait_until(
        lambda: blocks(watched, "prefilld", "quarantined") == 0,
        timeout_s=QUARANTINE_S + 1,
        what="quarantine ends by the clock, though decoded still sleeps",
    )
    watched.signal("decoded", signal.SIGCONT)
    assert running.result(timeout=60).ids == undisturbed
    assert len(waiting.result(timeout=60).ids) == 20
    watched.wait_serving()
    watched.wait_settled()
    assert watched.counter("prefilld", "kvpair_links_opened_total") > links
    assert watched.status()["link"]["peer_pid"] == watched.process("decoded").pid


def test_streams_go_on_while_prefilld_is_stopped_and_prompts_after_it(
    watched: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(watched, threads)
    undisturbed = ask(prompt_of(LONG_PROMPT_TOKENS), max_tokens=30).result(timeout=60).ids
    running = ask(prompt_of(30), max_tokens=LONG_ANSWER_TOKENS)
    wait_until(lambda: num_running(watched) == 1, what="one stream runs")
    before = chunks_announced(watched)
    halted = ask(prompt_of(LONG_PROMPT_TOKENS), max_tokens=30)
    wait_until(lambda: chunks_announced(watched) > before + 3, what="chunks are under way")
    watched.signal("prefilld", signal.SIGSTOP)
    assert len(running.result(timeout=60).ids) == LONG_ANSWER_TOKENS
    wait_until(
        lambda: watched.decoded_status()["state"] == "waiting-for-peer",
        what="decoded gave its silent peer up",
    )
    pool = watched.decoded_status()["pool"]
    assert pool["free"] + pool["reserved"] == pool["total"]
    watched.signal("prefilld", signal.SIGCONT)
    assert halted.result(timeout=60).ids == undisturbed
    watched.wait_serving()
    watched.wait_settled()


# --- coming up and going down --------------------------------------------------------------------


@pytest.mark.parametrize("first", ["prefilld", "decoded"])
def test_either_daemon_may_start_first_and_an_early_client_waits(
    tmp_path: Path, tiny_model: Path, threads: ThreadPoolExecutor, first: DaemonName
) -> None:
    pair = Pair(tmp_path, model=tiny_model)
    with pair.alone(first):
        early = asker(pair, threads)([5, 6], max_tokens=5) if first == "prefilld" else None
        pair.start("decoded" if first == "prefilld" else "prefilld")
        pair.wait_serving()
        if early is not None:
            assert len(early.result(timeout=20).ids) == 5
        assert len(pair.client.generate([5, 6], max_tokens=5, ignore_eos=True).ids) == 5
        pair.wait_settled()


def test_a_draining_prefilld_finishes_what_it_began_and_refuses_the_rest(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(pair, threads)
    early = RawPeer.connect(pair.socket)  # connected, but it has not asked yet
    before = chunks_announced(pair)
    answers = [ask(prompt_of(num_tokens), max_tokens=30) for num_tokens in (2_000, 1_000, 500)]
    wait_until(lambda: chunks_announced(pair) > before + 2, what="prompts run")
    pair.signal("prefilld", signal.SIGTERM)
    wait_until(lambda: is_draining(pair, "prefilld"), what="prefilld drains")
    with early:
        early.send(wire.Generate(prompt=[5, 6], max_tokens=4))
        (error,) = early.rest()
    assert isinstance(error, wire.Error)
    assert (error.code, error.retryable) == ("draining", True)
    assert [len(answer.result(timeout=60).ids) for answer in answers] == [30] * 3
    assert pair.process("prefilld").wait(timeout=10) == 0


def is_draining(pair: Pair, name: DaemonName) -> bool:
    pid = pair.process(name).pid
    started = 0
    for index, line in enumerate(log := pair.log(name)):
        if line["event"] == "daemon.started" and line.get("pid") == pid:
            started = index
    return any(line["event"] == "drain.started" for line in log[started:])


def test_a_new_client_of_a_draining_prefilld_is_told_so(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    """It has its own socket, so nobody else will answer there."""
    before = chunks_announced(pair)
    answer = asker(pair, threads)(prompt_of(LONG_PROMPT_TOKENS), max_tokens=4)
    wait_until(lambda: chunks_announced(pair) > before + 2, what="a prompt runs")
    pair.signal("prefilld", signal.SIGTERM)
    wait_until(lambda: is_draining(pair, "prefilld"), what="prefilld drains")
    with pytest.raises(RequestError, match="shutting down") as caught:
        pair.client.generate([5, 6], max_tokens=4)
    assert caught.value.code == "draining"
    assert len(answer.result(timeout=60).ids) == 4


def test_a_draining_decoded_finishes_its_streams_and_the_next_one_takes_the_rest(
    pair: Pair, threads: ThreadPoolExecutor
) -> None:
    ask = asker(pair, threads)
    running = [ask(prompt_of(20, salt), max_tokens=LONG_ANSWER_TOKENS) for salt in FOUR[:2]]
    wait_until(lambda: num_running(pair) == 2, what="two streams run")
    pair.signal("decoded", signal.SIGTERM)
    wait_until(lambda: is_draining(pair, "decoded"), what="decoded drains")
    late = ask(prompt_of(30), max_tokens=10)
    wait_until(lambda: queue(pair, "ready") == 1, what="a prompt waits for the successor")
    assert {len(answer.result(timeout=60).ids) for answer in running} == {LONG_ANSWER_TOKENS}
    assert pair.process("decoded").wait(timeout=10) == 0
    pair.restart("decoded")
    assert len(late.result(timeout=60).ids) == 10


@pytest.mark.parametrize("name", ["prefilld", "decoded"])
def test_a_second_sigterm_ends_at_once(pair: Pair, name: DaemonName) -> None:
    prompt, max_tokens = ([5, 6], 4_000) if name == "decoded" else (prompt_of(3_000), 4)
    before = chunks_announced(pair)
    with open_request(pair, prompt, max_tokens=max_tokens):
        wait_until(lambda: num_running(pair) == 1 or chunks_announced(pair) > before + 2)
        pair.signal(name, signal.SIGTERM)
        wait_until(lambda: is_draining(pair, name), what=f"{name} drains")
        pair.signal(name, signal.SIGTERM)
        assert pair.process(name).wait(timeout=2) == 128 + signal.SIGTERM


def test_what_is_left_at_the_drains_deadline_is_told_so(tmp_path: Path, tiny_model: Path) -> None:
    settings = {
        "limits.drain_timeout_s": 0.3,
        "prefilld.token_budget": 1,
        "decoded.num_blocks": 1024,
    }
    with Pair(tmp_path, model=tiny_model, settings=settings) as pair:
        in_decode = open_request(pair, [5, 6], max_tokens=4_000)
        wait_until(lambda: num_running(pair) == 1, what="one stream runs")
        before = chunks_announced(pair)
        in_prefill = open_request(pair, prompt_of(LONG_PROMPT_TOKENS), max_tokens=4)
        wait_until(lambda: chunks_announced(pair) > before, what="one prompt runs")
        ends: dict[DaemonName, RawPeer] = {"prefilld": in_prefill, "decoded": in_decode}
        for name, peer in ends.items():
            pair.signal(name, signal.SIGTERM)
            with peer:
                *_, error = peer.rest()
            assert isinstance(error, wire.Error), name
            assert (error.code, error.retryable) == ("draining", True)
            assert pair.process(name).wait(timeout=5) == 0


# --- what was never written, and whatever else -------------------------------------------------


def poison(pid: int, mapping: str, *, skip_bytes: int) -> int:
    """Overwrite a daemon's mapping with NaN from outside, but for its head; return how much."""
    nan = struct.pack("<f", float("nan"))
    num_bytes = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if mapping not in line or " rw" not in line:
            continue
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        assert match is not None
        start, end = (int(number, 16) for number in match.groups())
        size = end - start - skip_bytes
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            memory.seek(start + skip_bytes)
            num_bytes += memory.write(nan * (size // 4))
    return num_bytes


def test_what_was_never_written_in_prefillds_pool_is_never_read(each_pair: Pair) -> None:
    prompts = [prompt_of(num_tokens) for num_tokens in (1, 15, 16, 17, 100)]
    before = [each_pair.client.generate(p, max_tokens=20, ignore_eos=True).ids for p in prompts]
    block_bytes = int(each_pair.status()["pool"]["block_bytes"])
    pid = each_pair.process("prefilld").pid
    try:
        num_bytes = poison(pid, "kvpair-pool", skip_bytes=block_bytes)
    except PermissionError:
        pytest.skip("this user may not write another process's memory")
    assert num_bytes >= 1_000 * block_bytes
    after = [each_pair.client.generate(p, max_tokens=20, ignore_eos=True).ids for p in prompts]
    assert after == before
