"""prefilld against a decoded that the test plays: what it hands over, takes back, and survives.

prefilld must outlive every peer, and no client may pay for a decoded that misbehaves: its request
goes to the next one.
"""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from protocol import messages as wire
from protocol.client import Client
from protocol.codec import encode_message
from protocol.errors import ConnectionLostError, RequestError
from protocol.resuming import ResumePolicy
from tests.support.link_peers import FakeDecoded, FakeDecodedLink, credits_after
from tests.support.pair import Pair, wait_until
from tests.support.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from protocol.exchange import Answer
    from shared.daemon.model_host import ModelHost

PROMPT = [2 + (11 * index) % 250 for index in range(45)]
LONG_PROMPT = [2 + (7 * index) % 250 for index in range(2_000)]
PING_INTERVAL_S = 0.2
IGNORED = "kvpair_lease_messages_ignored_total"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    settings = {
        "prefilld.token_budget": 8,
        "link.ping_interval_s": PING_INTERVAL_S,
        "link.ping_timeout_s": 60,
        "link.quarantine_s": 30,
    }
    pair = Pair(tmp_path_factory.mktemp("f"), model=tiny_model, settings=settings)
    with pair.alone("prefilld"):
        yield pair


@pytest.fixture
def decoded(daemon: Pair, tiny_host: ModelHost) -> Iterator[FakeDecoded]:
    """A decoded to connect to, and a prefilld that lives: one that a test broke is replaced."""
    if daemon.process("prefilld").poll() is not None:
        daemon.start("prefilld")
        wait_until(lambda: daemon.state("prefilld") == "waiting-for-peer", timeout_s=60)
    with FakeDecoded(daemon.decoded_socket, tiny_host) as fake:
        yield fake
        # Not held by the next link, so free.
        if daemon.process("prefilld").poll() is None and not prefilld_is_settled(daemon):
            with fake.open():
                wait_until(lambda: prefilld_is_settled(daemon), what="prefilld's blocks are back")


@pytest.fixture
def asking(daemon: Pair) -> Iterator[Callable[..., Future[Answer]]]:
    """Ask prefilld on a thread."""
    with ThreadPoolExecutor(4) as pool:

        def ask(prompt: list[int], **options: Any) -> Future[Answer]:  # noqa: ANN401
            # What breaks off here is to be seen, not mended.
            alone = ResumePolicy(max_attempts=0)
            client = Client(daemon.socket, timeout_s=15, resume_policy=alone)
            return pool.submit(client.generate, prompt, ignore_eos=True, **options)

        yield ask


def prefilld_is_settled(daemon: Pair) -> bool:
    pool = daemon.status()["pool"]
    return bool(pool["free"] + pool["cached"] + pool["reserved"] == pool["total"])


def handoff_on(link: FakeDecodedLink) -> wire.Handoff:
    """Return the next HANDOFF; the CHUNKs before it say nothing that it does not say."""
    while not isinstance(message := link.receive(), wire.Handoff):
        assert isinstance(message, wire.Chunk | wire.Ping | wire.Pong), message
    return message


def pass_over(link: FakeDecodedLink) -> None:
    """Return once prefilld has dealt with everything that was sent to it."""
    link.send(wire.Ping(sent_ns=5))
    while not (isinstance(message := link.receive(), wire.Pong) and message.sent_ns == 5):
        assert isinstance(message, wire.Chunk | wire.Ping | wire.Pong), message


def finish(link: FakeDecodedLink, handoff: wire.Handoff) -> None:
    """Adopt the request that was just received, end its answer, release its lease."""
    with link.take_client() as client:
        link.send(link.answer(wire.Adopt, handoff.lease))
        say_end(client, handoff)
    link.send(link.answer(wire.Release, handoff.lease))


def say_end(client: RawPeer, handoff: wire.Handoff) -> None:
    usage = wire.Usage(
        prompt_tokens=handoff.request.prompt_tokens, cached_tokens=0, completion_tokens=1
    )
    times = wire.Timings(queue=0, prefill=0, decode=0, total=0)
    client.send(wire.End(reason="length", usage=usage, timings_ms=times))


def assert_serves(daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]) -> None:
    """The same prefilld hands a request over a fresh link, and has every block back."""
    assert daemon.process("prefilld").poll() is None, daemon.tail()
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"
        wait_until(lambda: prefilld_is_settled(daemon), what="prefilld's blocks are back")


# --- the hand-shake --------------------------------------------------------------------------


def test_a_refused_link_is_logged_with_both_values_and_tried_again(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    refusal = wire.Refuse(
        code="fingerprint", field="kv_block_size", ours="32", theirs="16", message="agree"
    )
    with decoded.accept() as link:
        link.expect(wire.Hello)
        link.send(refusal)
        assert link.rest() == []
    assert_serves(daemon, decoded, asking)
    (reason,) = {
        line["reason"] for line in daemon.log("prefilld") if line["event"] == "link.failed"
    } & {
        "link refused (fingerprint): kv_block_size is '16' here and '32' there; agree",
    }
    assert reason


def test_a_wrong_proof_is_refused_by_prefilld(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.accept() as link:
        link.send(link.welcome())
        link.send(link.mapped(digest=bytes(32)))
        refusal = link.expect(wire.Refuse)
        assert (refusal.code, refusal.field) == ("proof", "digest")
    assert_serves(daemon, decoded, asking)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param(lambda _link: [wire.Bye()], id="BYE"),
        pytest.param(lambda _link: [wire.Drain()], id="DRAIN"),
        pytest.param(lambda _link: [b"\xff\xff\xff\xff"], id="an endless frame"),
        pytest.param(lambda _link: [b"\x00\x00\x00\x01\xc1"], id="no msgpack"),
        pytest.param(lambda _link: [{"type": "welcome"}], id="WELCOME without fields"),
        pytest.param(lambda _link: [], id="nothing"),
    ],
)
def test_a_strange_answer_to_hello_ends_that_link_only(
    daemon: Pair,
    decoded: FakeDecoded,
    asking: Callable[..., Any],
    reply: Callable[[FakeDecodedLink], list[wire.Message]],
) -> None:
    with decoded.accept() as link:
        link.expect(wire.Hello)
        link.send(*reply(link))
        link.finish_sending()
        link.rest()
    assert_serves(daemon, decoded, asking)


def test_a_peer_that_welcomes_twice_loses_the_link(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.accept() as link:
        welcome = link.welcome()
        link.send(welcome, welcome)
        assert isinstance(link.rest()[-1], wire.Refuse)
    assert_serves(daemon, decoded, asking)


def let_ping_intervals_pass(daemon: Pair) -> None:
    before_s = daemon.status()["uptime_s"]
    wait_until(
        lambda: daemon.status()["uptime_s"] > before_s + 3 * PING_INTERVAL_S,
        what="several ping intervals passed in the life of this prefilld",
    )


def test_bye_right_behind_welcome_ends_that_link_only(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.accept() as link:
        link.send(link.welcome(), wire.Bye())
        let_ping_intervals_pass(daemon)
    assert_serves(daemon, decoded, asking)


def test_a_peer_that_said_bye_may_take_its_time_to_close(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    """Neither the clock (PING) nor a request may make prefilld break its own rules meanwhile."""
    with decoded.open() as link:
        link.send(wire.Bye())
        answer = asking(LONG_PROMPT, max_tokens=8)
        let_ping_intervals_pass(daemon)
    with decoded.open() as link:
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"
    assert_serves(daemon, decoded, asking)


# --- the client's connection -------------------------------------------------------------------


def test_prefilld_keeps_the_client_until_adopt_and_drops_it_then(
    decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        link.take_client().close()
        assert not answer.done()
        link.send(link.answer(wire.Reject, handoff.lease, code="fd-lost", message="dropped it"))
        again = handoff_on(link)
        assert again.lease != handoff.lease
        assert again.request == handoff.request
        client = link.take_client()
        link.send(link.answer(wire.Adopt, again.lease))
        # Its last other holder is gone with ADOPT, so this ends the client's connection.
        client.close()
        with pytest.raises(ConnectionLostError, match="went away"):
            answer.result(timeout=20)
        link.send(link.answer(wire.Release, again.lease))


def test_an_adopt_in_the_queue_of_a_dead_link_counts(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    adopted = daemon.counter("prefilld", "kvpair_handoffs_adopted_total")
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        client = link.take_client()
        daemon.signal("prefilld", signal.SIGSTOP)
        link.send(link.answer(wire.Adopt, handoff.lease))
    daemon.signal("prefilld", signal.SIGCONT)
    with client:
        wait_until(
            lambda: daemon.counter("prefilld", "kvpair_handoffs_adopted_total") == adopted + 1
        )
        assert not answer.done()
        say_end(client, handoff)
    assert answer.result(timeout=20).reason == "length"
    assert daemon.status()["pool"]["quarantined"] == len(handoff.blocks)
    assert_serves(daemon, decoded, asking)


@pytest.mark.parametrize("last_words", ["nothing", "half of an ADOPT", "an ADOPT of nobody"])
def test_what_was_not_adopted_goes_to_the_next_decoded(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any], last_words: str
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        adopt = encode_message(link.answer(wire.Adopt, handoff.lease))
        if last_words == "half of an ADOPT":
            link.send(adopt[:-1])
        elif last_words == "an ADOPT of nobody":
            link.send(link.answer(wire.Adopt, handoff.lease + 1_000))
    with decoded.open() as link:
        again = handoff_on(link)
        assert again.lease != handoff.lease
        assert again.request == handoff.request
        assert again.blocks == handoff.blocks
        finish(link, again)
        assert answer.result(timeout=20).reason == "length"
    assert_serves(daemon, decoded, asking)


def test_client_bytes_that_were_read_and_not_parsed_travel_as_residue(
    daemon: Pair, decoded: FakeDecoded
) -> None:
    cancel = encode_message(wire.Cancel())
    with decoded.open() as link, RawPeer.connect(daemon.socket) as client:
        client.send(wire.Generate(prompt=[*PROMPT], max_tokens=8), cancel[:9])
        handoff = handoff_on(link)
        assert handoff.residue == cancel[:9]
        link.take_client().close()
        # Taken back, the connection goes on where it was cut.
        link.send(link.answer(wire.Reject, handoff.lease, code="fd-lost", message="again"))
        again = handoff_on(link)
        assert again.residue == cancel[:9]
        link.take_client().close()
        client.send(cancel[9:])
        link.close()
        last = client.rest()[-1]
        assert isinstance(last, wire.End)
        assert last.reason == "cancelled"


def test_a_client_that_left_while_it_was_handed_over_is_noticed_when_it_comes_back(
    daemon: Pair, decoded: FakeDecoded
) -> None:
    with decoded.open() as link:
        with RawPeer.connect(daemon.socket) as client:
            client.send(wire.Generate(prompt=[*PROMPT], max_tokens=8))
            handoff_on(link)
        link.take_client().close()
        assert daemon.status()["queue"]["sent"] == 1
    wait_until(lambda: prefilld_is_settled(daemon), what="prefilld's blocks are back")


def test_a_request_that_decoded_cannot_serve_is_told_to_its_client(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        link.take_client().close()
        link.send(link.answer(wire.Reject, handoff.lease, code="invalid-message", message="odd"))
        with pytest.raises(RequestError, match="odd") as caught:
            answer.result(timeout=20)
        assert caught.value.code == "internal"
        wait_until(lambda: prefilld_is_settled(daemon))


# --- credits ---------------------------------------------------------------------------------


def test_nothing_is_handed_over_without_credit(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.accept() as link:
        link.send(link.welcome())
        empty = wire.Credits(free_blocks=0, free_sequences=0, queue_depth=0, seen=0)
        link.send(link.mapped(credits=empty))
        answer = asking(PROMPT, max_tokens=8)
        wait_until(lambda: daemon.status()["queue"]["ready"] == 1, what="the prompt is computed")
        short = wire.Credits(free_blocks=2, free_sequences=9, queue_depth=0, seen=0)
        link.send(wire.CreditUpdate(credits=short))
        pass_over(link)
        enough = wire.Credits(free_blocks=3, free_sequences=1, queue_depth=0, seen=0)
        link.send(wire.CreditUpdate(credits=enough))
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"


@pytest.mark.parametrize("kind", [wire.CreditUpdate, wire.Adopt, wire.Pong])
def test_a_peer_that_saw_more_than_was_sent_loses_the_link_and_no_request(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any], kind: type[wire.Message]
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        claims = credits_after(100)
        if kind is wire.Adopt:
            link.send(wire.Adopt(epoch=link.epoch, lease=handoff.lease, credits=claims))
        elif kind is wire.Pong:
            link.send(wire.Pong(sent_ns=1, credits=claims))
        else:
            link.send(wire.CreditUpdate(credits=claims))
        link.rest()
    with decoded.open() as link:
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"
    assert_serves(daemon, decoded, asking)


def test_a_draining_peer_is_asked_for_nothing_more(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        link.send(wire.Drain())
        pass_over(link)
        answer = asking(PROMPT, max_tokens=8)
        wait_until(lambda: daemon.status()["queue"]["ready"] == 1, what="the prompt is computed")
        pass_over(link)
        link.send(wire.Bye())
    with decoded.open() as link:
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"


# --- leases ----------------------------------------------------------------------------------


def test_late_doubled_and_unknown_answers_are_ignored_and_counted(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    def ignored(kind: str) -> float:
        return daemon.counter("prefilld", f'{IGNORED}{{kind="{kind}"}}')

    before = {kind: ignored(kind) for kind in ("release", "adopt", "reject", "nochunk")}
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        release = link.answer(wire.Release, handoff.lease)
        link.send(release)  # before ADOPT: it means nothing
        finish(link, handoff)
        assert answer.result(timeout=20).reason == "length"
        unknown = handoff.lease + 1_000
        link.send(
            release,
            link.answer(wire.Release, unknown),
            link.answer(wire.Adopt, handoff.lease),
            link.answer(wire.Reject, unknown, code="fd-lost", message=""),
            link.answer(wire.NoChunk, unknown),
        )
        pass_over(link)
        after = {kind: ignored(kind) for kind in before}
        assert {kind: after[kind] - before[kind] for kind in before} == {
            "release": 3,
            "adopt": 1,
            "reject": 1,
            "nochunk": 1,
        }
        assert prefilld_is_settled(daemon)
    assert_serves(daemon, decoded, asking)


def test_an_answer_of_another_epoch_ends_the_link_and_no_request(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        link.send(wire.Adopt(epoch=os.urandom(16), lease=handoff.lease, credits=link.credits))
        assert link.expect(wire.Refuse).code == "stale-epoch"
    with decoded.open() as link:
        finish(link, handoff_on(link))
        assert answer.result(timeout=20).reason == "length"
    assert_serves(daemon, decoded, asking)


def test_chunks_stop_at_nochunk_and_handoff_names_every_block(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(LONG_PROMPT, max_tokens=8)
        first = link.expect(wire.Chunk)
        assert (first.first, first.total_blocks) == (0, 126)
        link.send(link.answer(wire.NoChunk, first.lease))
        pass_over(link)
        handoff = link.expect(wire.Handoff)  # fails on a CHUNK
        assert handoff.lease == first.lease
        assert len(handoff.blocks) == 125
        assert handoff.blocks[: len(first.blocks)] == first.blocks
        finish(link, handoff)
        assert answer.result(timeout=20).reason == "length"
        wait_until(lambda: prefilld_is_settled(daemon))


def test_chunks_name_each_block_once_and_in_order(
    decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(LONG_PROMPT, max_tokens=8)
        blocks: list[int] = []
        while not isinstance(message := link.receive(), wire.Handoff):
            if isinstance(message, wire.Chunk):
                assert message.first == len(blocks)
                blocks += message.blocks
        assert message.blocks[: len(blocks)] == blocks
        assert len(blocks) >= 120
        finish(link, message)
        assert answer.result(timeout=20).reason == "length"


def test_a_cancelled_prompt_is_aborted_and_its_blocks_wait_for_release(
    daemon: Pair, decoded: FakeDecoded
) -> None:
    with decoded.open() as link:
        with RawPeer.connect(daemon.socket) as client:
            # A prompt that nobody asked before, or the prefix cache would leave nothing to cancel.
            client.send(wire.Generate(prompt=LONG_PROMPT[::-1], max_tokens=8))
            chunk = link.expect(wire.Chunk)
        while not isinstance(message := link.receive(), wire.Abort):
            assert isinstance(message, wire.Chunk | wire.Ping), message
        assert message.lease == chunk.lease
        assert daemon.status()["pool"]["leased"] == 125
        link.send(link.answer(wire.Release, chunk.lease))
        wait_until(lambda: prefilld_is_settled(daemon))


def test_what_a_lost_peer_still_holds_stays_in_quarantine_until_it_is_released(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        answer = asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        with link.take_client() as client:
            link.send(link.answer(wire.Adopt, handoff.lease))
            say_end(client, handoff)
        assert answer.result(timeout=20).reason == "length"
        assert daemon.status()["pool"]["leased"] == len(handoff.blocks)
    wait_until(
        lambda: daemon.status()["pool"]["quarantined"] == len(handoff.blocks),
        what="a peer that lives may be reading still",
    )
    with decoded.open(held=[handoff.lease, 99_999]) as link:
        pass_over(link)
        assert daemon.status()["pool"]["quarantined"] == len(handoff.blocks)
        link.send(link.answer(wire.Release, handoff.lease))
        wait_until(lambda: prefilld_is_settled(daemon))


def test_what_the_next_link_does_not_hold_leaves_quarantine_at_once(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    with decoded.open() as link:
        asking(PROMPT, max_tokens=8)
        handoff = handoff_on(link)
        with link.take_client() as client:
            link.send(link.answer(wire.Adopt, handoff.lease))
            say_end(client, handoff)
    wait_until(lambda: daemon.status()["pool"]["quarantined"] == len(handoff.blocks))
    with decoded.open():
        wait_until(lambda: prefilld_is_settled(daemon), timeout_s=2)


def test_nonsense_on_an_open_link_ends_it_and_no_request(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    for nonsense in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", encode_message(wire.Cancel())):
        with decoded.open() as link:
            answer = asking(PROMPT, max_tokens=8)
            handoff_on(link)
            link.send(nonsense)
            assert isinstance(link.rest()[-1], wire.Refuse)
        with decoded.open() as link:
            finish(link, handoff_on(link))
            assert answer.result(timeout=20).reason == "length"
    assert_serves(daemon, decoded, asking)


def test_a_peer_that_vanishes_between_two_requests_costs_nothing(
    daemon: Pair, decoded: FakeDecoded, asking: Callable[..., Any]
) -> None:
    decoded.open().close()
    with decoded.open() as link:
        link.finish_sending()
        link.rest()
    assert_serves(daemon, decoded, asking)
