"""decoded against a prefilld that the test plays: what it takes, what it refuses, what it survives.

decoded must outlive every peer.  After each piece of nonsense the test asks for a whole answer over
a fresh link, with the same process.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from protocol import messages as wire
from protocol.limits import VERSION
from shared.daemon.instance import start_time, this_instance
from shared.engine.local import LocalEngine
from tests.support.link_peers import NUM_BLOCKS, NUM_SLOTS, FakePrefilld
from tests.support.pair import Pair, wait_until
from tests.support.raw_peer import ClosedByPeerError, RawPeer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shared.daemon.model_host import ModelHost

DECODED_BLOCKS = 64
ALL_BLOCKS = DECODED_BLOCKS - 1
MAX_TOKENS = 24
PROMPT = [2 + (11 * index) % 250 for index in range(45)]
"""Two whole blocks and a part of one."""
PING_INTERVAL_S = 0.2


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pair]:
    settings = {
        "decoded.num_blocks": DECODED_BLOCKS,
        "decoded.max_batch": 4,
        "link.ping_interval_s": PING_INTERVAL_S,
        "link.ping_timeout_s": 60,
    }
    pair = Pair(tmp_path_factory.mktemp("d"), model=tiny_model, settings=settings)
    with pair.alone("decoded"):
        yield pair


@pytest.fixture
def peer(daemon: Pair, tiny_host: ModelHost) -> Iterator[FakePrefilld]:
    """A prefilld, and a decoded that takes its link: one that a test broke is replaced."""
    with FakePrefilld(daemon.decoded_socket, tiny_host) as fake:
        try:
            fake.greet()
            fake.link.close()
        except (AssertionError, OSError, ClosedByPeerError):
            daemon.kill("decoded")
            daemon.start("decoded")
            wait_until(lambda: daemon.state("decoded") == "waiting-for-peer", timeout_s=60)
            fake.connect()
        yield fake


@pytest.fixture(scope="module")
def expected(tiny_host: ModelHost) -> list[int]:
    engine = LocalEngine(tiny_host.model, num_blocks=NUM_BLOCKS)
    (answer,) = engine.generate([PROMPT], max_tokens=MAX_TOKENS, ignore_eos=True)
    return answer


def ids_and_last(client: RawPeer) -> tuple[list[int], wire.Message]:
    *tokens, last = client.rest()
    ids: list[int] = []
    for message in tokens:
        assert isinstance(message, wire.Tokens)
        assert message.index == len(ids)
        ids += message.ids
    return ids, last


def ask(peer: FakePrefilld) -> tuple[list[int], wire.Message]:
    """Hand a request over on the open link and return its answer."""
    lease = peer.prefill(PROMPT)
    client = peer.hand_over(peer.handoff(lease, max_tokens=MAX_TOKENS))
    assert peer.link.expect(wire.Adopt).lease == lease.lease_id
    assert peer.link.expect(wire.Release).lease == lease.lease_id
    with client:
        return ids_and_last(client)


def assert_serves(daemon: Pair, peer: FakePrefilld, expected: list[int]) -> None:
    """The same decoded process takes a new link, answers over it, and has every block back."""
    assert daemon.process("decoded").poll() is None, daemon.tail()
    peer.open()
    ids, last = ask(peer)
    assert ids == expected
    assert isinstance(last, wire.End)
    wait_until(lambda: free_blocks(daemon) == ALL_BLOCKS, what="every block of decoded is free")


def free_blocks(daemon: Pair) -> int:
    return int(daemon.decoded_status()["pool"]["free"])


def barrier(peer: FakePrefilld) -> None:
    """Everything sent before has been dealt with, and no other answer than RELEASE is waited for.

    `expect` fails on any message about a lease, so this also shows that none came.
    """
    peer.link.send(wire.Ping(sent_ns=7))
    while peer.link.expect(wire.Pong).sent_ns != 7:
        pass


def fresh_client() -> tuple[RawPeer, socket.socket]:
    """Return the client's end of a connection, and prefilld's, which it keeps until ADOPT."""
    ours, theirs = socket.socketpair()
    return RawPeer(ours), theirs


def is_silent_and_open(client: RawPeer) -> bool:
    """Whether nothing was written to a client, and its connection was not shut down."""
    poll = select.poll()
    poll.register(client.socket, select.POLLIN | select.POLLRDHUP)
    return not poll.poll(0)


# --- answers ---------------------------------------------------------------------------------


def test_a_handed_over_prompt_is_answered_as_one_process_would(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    assert_serves(daemon, peer, expected)


def test_what_was_never_written_in_either_pool_is_never_read(
    daemon: Pair, peer: FakePrefilld, tiny_host: ModelHost, expected: list[int]
) -> None:
    """Both pools are full of NaN; one read of a tail would make the whole answer NaN."""
    with FakePrefilld(daemon.decoded_socket, tiny_host, fill=float("nan")) as poisoned:
        poisoned.open()
        lease = poisoned.lend_unwritten(num_tokens=ALL_BLOCKS * 16 - 2)
        client = poisoned.hand_over(poisoned.handoff(lease, max_tokens=2))
        poisoned.link.expect(wire.Adopt)
        poisoned.link.expect(wire.Release)
        client.close()
        wait_until(lambda: free_blocks(daemon) == ALL_BLOCKS, what="the poison is in place")
        ids, last = ask(poisoned)
    assert ids == expected
    assert isinstance(last, wire.End)


def test_blocks_announced_in_chunks_make_the_same_answer(
    peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease))
    barrier(peer)
    with peer.hand_over(peer.handoff(lease, max_tokens=MAX_TOKENS)) as client:
        peer.link.expect(wire.Adopt)
        peer.link.expect(wire.Release)
        assert ids_and_last(client)[0] == expected


def test_an_adopted_answer_outlives_the_link(peer: FakePrefilld, expected: list[int]) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    with peer.hand_over(peer.handoff(lease, max_tokens=MAX_TOKENS)) as client:
        peer.link.expect(wire.Adopt)
        peer.link.close()
        assert ids_and_last(client)[0] == expected


# --- the hand-shake --------------------------------------------------------------------------


def test_another_version_is_refused_with_both_versions(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.connect().send(peer.hello(version=VERSION + 1))
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert (refusal.code, refusal.field) == ("version", "version")
    assert (refusal.ours, refusal.theirs) == (str(VERSION), str(VERSION + 1))
    assert_serves(daemon, peer, expected)


def test_a_hello_of_a_newer_release_is_refused_as_such_though_it_cannot_be_read(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.connect().send({"type": "hello", "version": VERSION + 1, "novelty": [1, 2]})
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "version"
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize(
    ("name", "theirs"), [("kv_block_size", 32), ("model_content", "another"), ("new_field", 1)]
)
def test_the_field_of_the_fingerprint_that_differs_is_named_with_both_values(
    daemon: Pair,
    peer: FakePrefilld,
    expected: list[int],
    tiny_host: ModelHost,
    name: str,
    theirs: int | str,
) -> None:
    fields = dict(tiny_host.fields)
    peer.connect().send(peer.hello(fields=fields | {name: theirs}))
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert (refusal.code, refusal.field) == ("fingerprint", name)
    assert (refusal.ours, refusal.theirs) == (str(fields.get(name, "absent")), str(theirs))
    assert_serves(daemon, peer, expected)


def test_another_backend_host_and_pid_confusion_are_refused_by_name(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    pid = daemon.process("decoded").pid
    ours = this_instance()
    itself = replace(ours, pid=pid, start_time=start_time(pid) or 0)
    cases: dict[str, dict[str, object]] = {
        "backend": {"backend": "cuda"},
        "host": {"instance": replace(ours, boot_id="another")},
        "self-connect": {"instance": itself},
        "same-pid": {"instance": replace(itself, pid_namespace=1)},
    }
    for code, changes in cases.items():
        peer.connect().send(peer.hello(**changes))
        (refusal,) = peer.link.rest()
        assert isinstance(refusal, wire.Refuse)
        assert refusal.code == code
        assert refusal.message
    assert_serves(daemon, peer, expected)


def test_a_second_link_is_refused_while_the_first_goes_on(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    with RawPeer.connect(daemon.decoded_socket) as second:
        second.send(peer.hello(epoch=os.urandom(16)))
        (refusal,) = second.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "link-busy"
    assert str(os.getpid()) in refusal.message
    assert ask(peer)[0] == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else for a moment")
def test_another_user_may_not_open_the_link(
    daemon: Pair, peer: FakePrefilld, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The socket's group lets clients in; the link is for the pair's own user."""
    folder = daemon.decoded_socket.parent
    folder.chmod(0o750)
    monkeypatch.chdir(folder)  # the folders above are closed to others
    os.seteuid(12_345)
    try:
        stranger = RawPeer.connect(type(folder)(daemon.decoded_socket.name))
    finally:
        os.seteuid(0)
    with stranger:
        stranger.send(peer.hello())
        (refusal,) = stranger.rest()
    assert isinstance(refusal, wire.Refuse)
    assert (refusal.code, refusal.ours, refusal.theirs) == ("credentials", "0", "12345")
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool_bytes": 1 << 20},
        {"pool_bytes": 1 << 40},
        {"num_blocks": NUM_BLOCKS + 1_000},
        {"num_blocks": 0},
        {"num_blocks": 1 << 62},
        {"control_slots": NUM_SLOTS + 1},
        {"proof_bytes": 1 << 30},
    ],
    ids=str,
)
def test_a_map_that_does_not_fit_its_memory_is_refused(
    daemon: Pair, peer: FakePrefilld, expected: list[int], changes: dict[str, int]
) -> None:
    peer.greet()
    peer.offer(peer.map(**changes))
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize("num_sent", [0, 1])
def test_a_map_without_its_descriptors_is_refused_as_fd_lost(
    daemon: Pair, peer: FakePrefilld, expected: list[int], num_sent: int
) -> None:
    peer.greet()
    fds = [peer.pool.export()][:num_sent]
    peer.link.send(peer.map(), fds=fds)
    for fd in fds:
        os.close(fd)
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "fd-lost"
    assert_serves(daemon, peer, expected)


def unsealed(peer: FakePrefilld) -> int:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, peer.layout.pool_bytes)
    return fd


def a_pipe(_peer: FakePrefilld) -> int:
    reader, writer = os.pipe()
    os.close(writer)
    return reader


def dev_zero(_peer: FakePrefilld) -> int:
    return os.open("/dev/zero", os.O_RDWR)


def the_page(peer: FakePrefilld) -> int:
    return peer.page.export()


@pytest.mark.parametrize("make", [unsealed, a_pipe, dev_zero, the_page])
def test_a_descriptor_that_is_no_sealed_pool_is_refused(
    daemon: Pair, peer: FakePrefilld, expected: list[int], make: Callable[[FakePrefilld], int]
) -> None:
    peer.greet()
    fds = [make(peer), peer.page.export()]
    peer.link.send(peer.map(), fds=fds)
    for fd in fds:
        os.close(fd)
    (refusal,) = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert_serves(daemon, peer, expected)


def test_a_peer_that_leaves_in_mid_handshake_leaves_no_trace(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    """HELLO with nonsense, or with the end, right behind it must not leave a link that is busy."""
    peer.connect().send(peer.hello(), b"\x00\x00\x00\x01\xc1")
    peer.link.rest()
    assert_serves(daemon, peer, expected)
    peer.connect().send(peer.hello())
    peer.link.close()
    assert_serves(daemon, peer, expected)
    peer.greet()
    peer.link.close()
    assert_serves(daemon, peer, expected)
    peer.greet()
    peer.offer(peer.map())
    peer.link.close()
    assert_serves(daemon, peer, expected)


def test_bye_right_behind_hello_ends_the_link_and_nothing_else(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.connect().send(peer.hello(), wire.Bye())
    peer.link.finish_sending()
    peer.link.rest()
    assert_serves(daemon, peer, expected)


def test_bye_behind_a_hello_that_is_refused_ends_the_link_and_nothing_else(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.connect().send(peer.hello(backend="cuda"), wire.Bye())
    peer.link.finish_sending()
    peer.link.rest()
    assert_serves(daemon, peer, expected)


def test_bye_right_behind_map_ends_the_link_and_nothing_else(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.greet()
    peer.offer(peer.map())
    peer.link.send(wire.Bye())
    let_ping_intervals_pass(daemon)
    assert_serves(daemon, peer, expected)


def let_ping_intervals_pass(daemon: Pair) -> None:
    before_s = daemon.decoded_status()["uptime_s"]
    wait_until(
        lambda: daemon.decoded_status()["uptime_s"] > before_s + 3 * PING_INTERVAL_S,
        what="several ping intervals passed in the life of this decoded",
    )


def test_a_peer_that_said_bye_may_take_its_time_to_close(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    """Whatever decoded does by the clock (PING), it must not break its own rules meanwhile."""
    peer.open()
    peer.link.send(wire.Bye())
    let_ping_intervals_pass(daemon)
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param(lambda peer: [peer.hello(), peer.hello()], id="HELLO twice"),
        pytest.param(lambda peer: [peer.hello(), wire.Ping(sent_ns=1)], id="PING before MAP"),
        pytest.param(
            lambda peer: [peer.hello(), wire.Abort(epoch=peer.epoch, lease=1)],
            id="ABORT before MAP",
        ),
    ],
)
def test_a_message_out_of_turn_is_refused(
    daemon: Pair,
    peer: FakePrefilld,
    expected: list[int],
    messages: Callable[[FakePrefilld], list[wire.Message]],
) -> None:
    peer.connect().send(*messages(peer))
    *_, refusal = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "unexpected-message"
    assert_serves(daemon, peer, expected)


# --- leases ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks": [NUM_BLOCKS]},
        {"blocks": [(1 << 31) - 1]},
        {"blocks": [1, 1]},
        {"slot": NUM_SLOTS},
        {"total_blocks": 1},
        {"first": 5},
        {"blocks": [], "total_blocks": 0},
    ],
    ids=str,
)
def test_a_chunk_that_contradicts_the_pool_or_itself_ends_the_link(
    daemon: Pair, peer: FakePrefilld, expected: list[int], changes: dict[str, object]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease, **changes))
    *_, refusal = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "invalid-message"
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize(
    ("changes", "request_changes"),
    [
        ({"blocks": [1, 2, NUM_BLOCKS]}, {}),
        ({"blocks": [1, 1, 2]}, {}),
        ({"blocks": [1, 2]}, {}),
        ({"blocks": [1, 2, 3, 4]}, {}),
        ({"slot": NUM_SLOTS}, {}),
        ({"num_tokens": 44}, {}),
        ({"num_tokens": 0, "blocks": []}, {"prompt_tokens": 0}),
        ({"total_blocks": 2}, {}),
        ({}, {"ids": []}),
        ({}, {"ids": [1 << 30]}),
        ({}, {"delivered": 2}),
        ({}, {"prompt_tokens": 46}),
        ({}, {"sampling": wire.Sampling(seed=None)}),
        ({}, {"max_tokens": 1}),
        ({}, {"max_tokens": 0}),
        ({}, {"prompt_tokens": 40, "ids": [5] * 6, "max_tokens": 3}),
    ],
    ids=str,
)
def test_a_handoff_that_contradicts_the_pool_or_itself_ends_the_link(
    daemon: Pair,
    peer: FakePrefilld,
    expected: list[int],
    changes: dict[str, object],
    request_changes: dict[str, object],
) -> None:
    """Nothing is written to its client, whose connection was never decoded's."""
    peer.open()
    lease = peer.prefill(PROMPT)
    handoff = peer.handoff(lease, max_tokens=MAX_TOKENS, request=request_changes, **changes)
    client, theirs = fresh_client()
    with client, theirs:
        peer.link.send(handoff, fds=[theirs.fileno()])
        *_, refusal = peer.link.rest()
        assert isinstance(refusal, wire.Refuse)
        assert refusal.code == "invalid-message"
        assert is_silent_and_open(client)
    assert_serves(daemon, peer, expected)


@pytest.mark.parametrize(
    "changes",
    [{"total_blocks": 30}, {"blocks": [3, 2, 1]}, {"slot": 5}, {"generation": 99}],
    ids=str,
)
def test_a_handoff_that_contradicts_its_chunks_is_not_adopted(
    daemon: Pair, peer: FakePrefilld, expected: list[int], changes: dict[str, object]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease))
    barrier(peer)
    handoff = peer.handoff(lease, max_tokens=MAX_TOKENS, **changes)
    client, theirs = fresh_client()
    with client, theirs:
        peer.link.send(handoff, fds=[theirs.fileno()])
        peer.link.finish_sending()
        assert not any(isinstance(message, wire.Adopt) for message in peer.link.rest())
        assert is_silent_and_open(client)
    assert_serves(daemon, peer, expected)


def no_socket() -> int:
    return os.open("/dev/null", os.O_RDWR)


def unconnected() -> int:
    return socket.socket(socket.AF_UNIX).detach()


def datagrams() -> int:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    other.close()
    return one.detach()


@pytest.mark.parametrize("make", [no_socket, unconnected, datagrams])
def test_a_handoff_whose_descriptor_is_no_connection_harms_nobody(
    daemon: Pair, peer: FakePrefilld, expected: list[int], make: Callable[[], int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    fd = make()
    peer.link.send(peer.handoff(lease, max_tokens=MAX_TOKENS), fds=[fd])
    os.close(fd)
    peer.link.finish_sending()
    peer.link.rest()
    assert_serves(daemon, peer, expected)


def test_a_handoff_without_its_descriptor_is_rejected_and_the_next_is_taken(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.handoff(lease, max_tokens=MAX_TOKENS))
    reject = peer.link.expect(wire.Reject)
    assert (reject.lease, reject.code) == (lease.lease_id, "fd-lost")
    barrier(peer)
    assert ask(peer)[0] == expected


def test_a_reserved_lease_without_its_descriptor_gives_its_room_back(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease))
    peer.link.send(peer.handoff(lease, max_tokens=MAX_TOKENS))
    assert peer.link.expect(wire.Reject).code == "fd-lost"
    barrier(peer)
    assert free_blocks(daemon) == ALL_BLOCKS
    assert ask(peer)[0] == expected


def test_an_aborted_lease_is_released_exactly_once(daemon: Pair, peer: FakePrefilld) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease))
    abort = wire.Abort(epoch=peer.epoch, lease=lease.lease_id)
    peer.link.send(abort, abort)
    assert peer.link.expect(wire.Release).lease == lease.lease_id
    peer.link.send(abort, wire.Abort(epoch=peer.epoch, lease=9_999))
    barrier(peer)
    barrier(peer)
    counters = daemon.decoded_status()["counters"]
    assert counters['kvpair_lease_messages_ignored_total{kind="abort"}'] >= 3


def test_a_prompt_that_found_no_room_is_taken_at_handoff_once_there_is(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    large, small = peer.prefill(PROMPT, slot=0), peer.prefill(PROMPT, slot=1)
    peer.link.send(peer.chunk(large, total_blocks=ALL_BLOCKS))
    peer.link.send(peer.chunk(small))
    declined = peer.link.expect(wire.NoChunk)
    assert declined.lease == small.lease_id
    assert declined.credits.free_blocks == 0
    assert declined.credits.seen == 2
    peer.link.send(wire.Abort(epoch=peer.epoch, lease=large.lease_id))
    assert peer.link.expect(wire.Release).lease == large.lease_id
    with peer.hand_over(peer.handoff(small, max_tokens=MAX_TOKENS)) as client:
        assert peer.link.expect(wire.Adopt).lease == small.lease_id
        peer.link.expect(wire.Release)
        assert ids_and_last(client)[0] == expected


def test_a_declined_lease_is_released_exactly_once_too(peer: FakePrefilld) -> None:
    peer.open()
    large, small = peer.prefill(PROMPT, slot=0), peer.prefill(PROMPT, slot=1)
    peer.link.send(peer.chunk(large, total_blocks=ALL_BLOCKS))
    peer.link.send(peer.chunk(small))
    peer.link.expect(wire.NoChunk)
    peer.link.send(wire.Abort(epoch=peer.epoch, lease=small.lease_id))
    assert peer.link.expect(wire.Release).lease == small.lease_id
    barrier(peer)


def test_a_handoff_beyond_the_credits_is_rejected_and_its_client_left_alone(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    large, small = peer.prefill(PROMPT, slot=0), peer.prefill(PROMPT, slot=1)
    peer.link.send(peer.chunk(large, total_blocks=ALL_BLOCKS))
    client, theirs = fresh_client()
    with client, theirs:
        peer.link.send(peer.handoff(small, max_tokens=MAX_TOKENS), fds=[theirs.fileno()])
        reject = peer.link.expect(wire.Reject)
        assert (reject.lease, reject.code) == (small.lease_id, "no-room")
        barrier(peer)
        assert is_silent_and_open(client)
    assert_serves(daemon, peer, expected)


def test_a_lease_revoked_before_its_copy_ends_as_prefill_lost(peer: FakePrefilld) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.revoke(lease.slot)
    with peer.hand_over(peer.handoff(lease, max_tokens=MAX_TOKENS)) as client:
        peer.link.expect(wire.Adopt)
        _, last = ids_and_last(client)
    assert isinstance(last, wire.Error)
    assert (last.code, last.retryable) == ("prefill-lost", True)
    assert peer.link.expect(wire.Release).lease == lease.lease_id
    barrier(peer)


def test_a_lease_revoked_between_its_chunks_and_its_handoff_ends_as_prefill_lost(
    daemon: Pair, peer: FakePrefilld
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    pulled = daemon.counter("decoded", "kvpair_pulled_bytes_total")
    peer.link.send(peer.chunk(lease))
    wait_until(lambda: daemon.counter("decoded", "kvpair_pulled_bytes_total") > pulled)
    peer.revoke(lease.slot)
    with peer.hand_over(peer.handoff(lease, max_tokens=MAX_TOKENS)) as client:
        peer.link.expect(wire.Adopt)
        _, last = ids_and_last(client)
    assert isinstance(last, wire.Error)
    assert last.code == "prefill-lost"
    assert peer.link.expect(wire.Release).lease == lease.lease_id


def test_a_revoked_reservation_is_given_back_when_it_is_aborted(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.revoke(lease.slot)
    peer.link.send(peer.chunk(lease))
    wait_until(lambda: free_blocks(daemon) == ALL_BLOCKS, what="what was revoked is not held")
    peer.link.send(wire.Abort(epoch=peer.epoch, lease=lease.lease_id))
    assert peer.link.expect(wire.Release).lease == lease.lease_id
    assert ask(peer)[0] == expected


def test_a_frame_of_another_epoch_ends_the_link(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    peer.link.send(peer.chunk(lease, epoch=os.urandom(16)))
    *_, refusal = peer.link.rest()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "stale-epoch"
    assert_serves(daemon, peer, expected)


def test_what_was_reserved_comes_back_when_the_link_ends(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    for slot in range(3):
        lease = peer.prefill(PROMPT, slot=slot)
        peer.link.send(peer.chunk(lease))
    barrier(peer)
    peer.link.close()
    wait_until(lambda: free_blocks(daemon) == ALL_BLOCKS, what="the reservations are dropped")
    assert_serves(daemon, peer, expected)


# --- the client's connection -------------------------------------------------------------------


def test_a_handoff_whose_sender_died_is_not_adopted_and_its_client_left_alone(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    """ADOPT cannot be told any more, so the stream may be another decoded's by now."""
    peer.open()
    lease = peer.prefill(PROMPT)
    client, theirs = fresh_client()
    with client, theirs:
        daemon.signal("decoded", signal.SIGSTOP)
        peer.link.send(peer.handoff(lease, max_tokens=MAX_TOKENS), fds=[theirs.fileno()])
        peer.link.close()
        daemon.signal("decoded", signal.SIGCONT)
        assert_serves(daemon, peer, expected)
        assert is_silent_and_open(client)


CANCEL = struct.pack("!I", 13) + b"\x81\xa4type\xa6cancel"


@pytest.mark.parametrize("num_bytes", [1, 4, 10, len(CANCEL)])
def test_a_cancel_that_prefilld_had_read_in_part_still_counts(
    peer: FakePrefilld, num_bytes: int
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    handoff = peer.handoff(lease, max_tokens=900, residue=CANCEL[:num_bytes])
    with peer.hand_over(handoff) as client:
        if num_bytes < len(CANCEL):
            client.send(CANCEL[num_bytes:])
        _, last = ids_and_last(client)
    assert isinstance(last, wire.End)
    assert last.reason == "cancelled"


def test_nonsense_in_the_residue_is_the_clients_fault_alone(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.open()
    lease = peer.prefill(PROMPT)
    handoff = peer.handoff(lease, max_tokens=900, residue=b"\x00\x00\x00\x01\xc1")
    with peer.hand_over(handoff) as client:
        last = client.rest()[-1]
    assert isinstance(last, wire.Error)
    assert last.code == "malformed-frame"
    assert peer.link.expect(wire.Adopt).lease == lease.lease_id
    assert peer.link.expect(wire.Release).lease == lease.lease_id
    assert ask(peer)[0] == expected
    wait_until(lambda: free_blocks(daemon) == ALL_BLOCKS, what="every block of decoded is free")
