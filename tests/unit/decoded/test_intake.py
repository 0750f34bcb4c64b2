"""decoded's book of held leases: each lease ends in one RELEASE and no block is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoded.early_step import EarlyStep
from decoded.intake import Intake
from decoded.lease_effects import (
    BlockCopy,
    Effect,
    Ignored,
    Lost,
    Pulled,
    SendAdopt,
    SendNoChunk,
    SendReject,
    SendRelease,
    Unreserve,
)
from shared.ops.sampling import SamplingParams


class Room:
    """Blocks 1 to `num_blocks`, handed out once each."""

    def __init__(self, num_blocks: int) -> None:
        self.free = list(range(1, num_blocks + 1))

    def reserve(self, num_blocks: int) -> list[int] | None:
        if len(self.free) < num_blocks:
            return None
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken


def make(num_blocks: int = 10) -> tuple[Intake[str], Room]:
    room = Room(num_blocks)
    return Intake(reserve=room.reserve), room


def chunk(
    intake: Intake[str],
    first: int,
    blocks: list[int],
    total: int = 4,
    lease_id: int = 7,
    early: EarlyStep | None = None,
) -> list[Effect[str]]:
    return intake.chunk(
        lease_id=lease_id,
        slot=0,
        generation=1,
        first=first,
        blocks=blocks,
        total=total,
        early=early,
    )


def handoff(
    intake: Intake[str],
    blocks: list[int],
    total: int = 4,
    lease_id: int = 7,
    first_token: int | None = None,
) -> list[Effect[str]]:
    return intake.handoff(
        lease_id=lease_id,
        slot=0,
        generation=1,
        blocks=blocks,
        total=total,
        request="r",
        first_token=first_token,
    )


def copy_all(intake: Intake[str], *, is_valid: bool = True) -> list[Effect[str]]:
    effects: list[Effect[str]] = []
    while copies := intake.next_copies(1):
        for copy in copies:
            effects += intake.copied(copy, is_valid=is_valid)
    return effects


def test_a_handoff_is_adopted_pulled_and_released_before_it_starts() -> None:
    """RELEASE leaves before anything else is done with the blocks: prefilld waits for them."""
    intake, _ = make()
    assert handoff(intake, [21, 22]) == [SendAdopt(7, "r")]
    assert intake.held == [7]
    assert copy_all(intake) == [SendRelease(7), Pulled("r", [1, 2, 3, 4])]
    assert intake.held == []


def test_chunks_are_pulled_before_the_handoff_and_only_the_rest_after_it() -> None:
    intake, _ = make()
    assert chunk(intake, 0, [21, 22]) == []
    (copy,) = intake.next_copies(8)
    assert (copy.sources, copy.targets) == ([21, 22], [1, 2])
    assert intake.copied(copy, is_valid=True) == []
    assert handoff(intake, [21, 22, 23]) == [SendAdopt(7, "r")]
    (copy,) = intake.next_copies(8)
    assert (copy.sources, copy.targets) == ([23], [3])


def test_a_handoff_whose_chunks_were_all_copied_starts_at_once() -> None:
    intake, _ = make()
    chunk(intake, 0, [21, 22])
    copy_all(intake)
    assert handoff(intake, [21, 22]) == [
        SendAdopt(7, "r"),
        SendRelease(7),
        Pulled("r", [1, 2, 3, 4]),
    ]


def test_without_room_a_chunk_is_declined_and_the_handoff_tries_again() -> None:
    intake, room = make(num_blocks=3)
    assert chunk(intake, 0, [21]) == [SendNoChunk(7)]
    assert chunk(intake, 1, [22]) == [], "a CHUNK that crossed our NOCHUNK is no fault"
    rejected = handoff(intake, [21, 22])
    assert rejected == [SendReject(7, "no-room", "no room for a sequence of 4 blocks", "r")]
    room.free.append(4)
    assert handoff(intake, [21, 22]) == [SendAdopt(7, "r")]


@pytest.mark.parametrize("is_copying", [False, True])
def test_an_aborted_reservation_is_released_after_any_copy_in_flight(*, is_copying: bool) -> None:
    intake, _ = make()
    chunk(intake, 0, [21, 22])
    ended = [SendRelease(7), Unreserve([1, 2, 3, 4])]
    if is_copying:
        (copy,) = intake.next_copies(1)
        assert intake.abort(7) == []
        assert intake.copied(copy, is_valid=True) == ended
    else:
        assert intake.abort(7) == ended
    assert intake.abort(7) == [Ignored("abort", 7)]


def test_an_aborted_lease_that_was_declined_is_still_released_once() -> None:
    """Prefilld waits for exactly one RELEASE after each ABORT, whatever became of the lease."""
    intake, _ = make(num_blocks=1)
    chunk(intake, 0, [21])
    assert intake.abort(7) == [SendRelease(7)]
    assert intake.abort(7) == [Ignored("abort", 7)]


def test_a_revoked_copy_ends_an_adopted_request() -> None:
    intake, _ = make()
    handoff(intake, [21])
    assert copy_all(intake, is_valid=False) == [
        Lost("r"),
        SendRelease(7),
        Unreserve([1, 2, 3, 4]),
    ]


def test_a_revoked_reservation_keeps_nothing_but_its_abort() -> None:
    intake, _ = make()
    chunk(intake, 0, [21])
    assert copy_all(intake, is_valid=False) == [Unreserve([1, 2, 3, 4])]
    assert intake.abort(7) == [SendRelease(7)]


def test_after_the_link_is_lost_adopted_leases_go_on_and_nothing_is_sent() -> None:
    """The mapping outlives prefilld, so what was handed over can still be pulled."""
    intake, _ = make()
    handoff(intake, [21])
    intake.chunk(lease_id=8, slot=1, generation=1, first=0, blocks=[31], total=2)
    assert intake.link_lost() == [Unreserve([5, 6])]
    assert copy_all(intake) == [Pulled("r", [1, 2, 3, 4])]


def test_adopted_requests_are_copied_before_reservations() -> None:
    """Somebody waits for those; a reservation is work ahead of time."""
    intake, _ = make()
    chunk(intake, 0, [21])
    handoff(intake, [31], lease_id=9)
    (first, second) = intake.next_copies(8)
    assert (first.lease_id, second.lease_id) == (9, 7)


def test_a_cancelled_copy_is_released_when_it_is_done() -> None:
    intake, _ = make()
    handoff(intake, [21, 22])
    (copy,) = intake.next_copies(1)
    assert intake.cancel(7) == []
    assert intake.copied(copy, is_valid=True) == [SendRelease(7), Unreserve([1, 2, 3, 4])]


def test_a_chunk_that_leaves_a_gap_is_ignored() -> None:
    """Its blocks would land in the wrong place; HANDOFF names the whole table anyway."""
    intake, _ = make()
    chunk(intake, 0, [21])
    assert chunk(intake, 2, [23]) == [Ignored("chunk", 7)]


def test_nothing_follows_the_chunk_that_brings_the_first_step() -> None:
    """Under another one's step, the first would run in blocks that nobody knew to be in use."""
    intake, _ = make()
    early = EarlyStep(position=20, sampling=SamplingParams())
    assert chunk(intake, 0, [21, 22], early=early) == []
    assert chunk(intake, 2, []) == [Ignored("chunk", 7)]
    assert chunk(intake, 2, [], early=EarlyStep(position=20, sampling=SamplingParams())) == [
        Ignored("chunk", 7)
    ]
    (copy,) = intake.next_copies(4)
    assert copy.early is early


def test_a_handoff_without_its_descriptor_is_rejected_after_any_copy_in_flight() -> None:
    """REJECT implies RELEASE, so it must not leave while the blocks are being read."""
    intake, _ = make()
    chunk(intake, 0, [21])
    (copy,) = intake.next_copies(1)
    assert intake.refuse(7, "fd-lost", "the descriptor did not arrive", "r") == []
    assert intake.copied(copy, is_valid=True) == [
        SendReject(7, "fd-lost", "the descriptor did not arrive", "r"),
        Unreserve([1, 2, 3, 4]),
    ]


def test_a_handoff_that_contradicts_its_chunks_is_rejected() -> None:
    """Other blocks were copied already, so the sequence would read another prompt."""
    intake, _ = make()
    chunk(intake, 0, [21])
    first, second = handoff(intake, [99, 22])
    assert isinstance(first, SendReject)
    assert first.code == "invalid-message"
    assert second == Unreserve([1, 2, 3, 4])


def test_a_first_token_that_contradicts_the_handoff_before_it_ends_the_request() -> None:
    """The engine may read the page while HANDOFF is being adopted; the step runs to its end."""
    intake, _ = make()
    early = EarlyStep(position=0, sampling=SamplingParams())
    intake.chunk(lease_id=7, slot=0, generation=1, first=0, blocks=[21, 22], total=4, early=early)
    (copy,) = intake.next_copies(8)
    assert handoff(intake, [21, 22], first_token=5) == [SendAdopt(7, "r")]
    early.token_id, early.is_in_flight = 6, True
    lost = Lost("r", "prefilld told two first tokens of the answer")
    assert intake.copied(copy, is_valid=True) == [lost]
    early.is_in_flight = False
    assert intake.early_done(7) == [SendRelease(7), Unreserve([1, 2, 3, 4])]


def test_a_handoff_of_an_adopted_lease_is_rejected_and_harms_nothing() -> None:
    intake, _ = make()
    handoff(intake, [21])
    ignored, rejected = handoff(intake, [21])
    assert ignored == Ignored("handoff", 7)
    assert isinstance(rejected, SendReject)
    assert copy_all(intake) == [SendRelease(7), Pulled("r", [1, 2, 3, 4])]


def test_seen_counts_what_reserves() -> None:
    """Prefilld subtracts what it sent since, so both must count the same frames."""
    intake, _ = make()
    chunk(intake, 0, [21])
    chunk(intake, 1, [22])
    handoff(intake, [21, 22])
    handoff(intake, [31], lease_id=8)
    assert intake.seen == 3


MESSAGES = ("chunk", "last", "again", "handoff", "abort", "cancel")
WORK = ("copy", "void", "start-copy", "begin", "early-done")
actions = st.lists(st.tuples(st.sampled_from([*MESSAGES, *WORK]), st.integers(1, 4)), max_size=60)


@given(actions=actions, num_blocks=st.integers(0, 12), is_link_lost=st.booleans())
def test_every_lease_ends_once_and_every_block_comes_back(
    actions: list[tuple[str, int]], num_blocks: int, *, is_link_lost: bool
) -> None:
    """Whatever order messages and copies come in, nothing leaks and nothing is freed twice."""
    intake, room = make(num_blocks)
    running: list[BlockCopy] = []
    begun: list[BlockCopy] = []
    told: dict[int, int] = {}
    adopted: set[int] = set()

    def carry_out(effects: list[Effect[str]]) -> None:
        for effect in effects:
            match effect:
                case Unreserve(blocks) | Pulled(_, blocks):
                    busy = {block for copy in running for block in copy.targets}
                    if isinstance(effect, Unreserve):  # a sequence's blocks wait for its own steps
                        busy |= {
                            block
                            for copy in begun
                            if copy.early is not None
                            for block in copy.early.block_table
                        }
                    assert not busy & set(blocks), "freed under a running copy or step"
                    assert not set(blocks) & set(room.free), "freed twice"
                    room.free += blocks
                case SendRelease(lease_id):
                    told[lease_id] -= 1
                    assert told[lease_id] == 0
                case SendReject(lease_id):
                    told[lease_id] = 0
                case SendAdopt(lease_id):
                    adopted.add(lease_id)
                case _:
                    pass

    def end_early(copy: BlockCopy) -> None:
        assert copy.early is not None
        copy.early.is_in_flight = False
        carry_out(intake.early_done(copy.lease_id))

    base = 0
    for name, number in actions:
        lease_id = base + number
        if name == "again" and told.get(lease_id):
            early = EarlyStep(position=0, sampling=SamplingParams())
            carry_out(chunk(intake, 1, [], total=3, lease_id=lease_id, early=early))
        elif name in ("chunk", "last") and told.get(lease_id) is None:
            told[lease_id] = 1
            early = EarlyStep(position=0, sampling=SamplingParams()) if name == "last" else None
            carry_out(chunk(intake, 0, [50], total=3, lease_id=lease_id, early=early))
        elif name == "handoff" and lease_id not in adopted and told.get(lease_id) != 0:
            told[lease_id] = 1
            carry_out(handoff(intake, [50, 51], total=3, lease_id=lease_id, first_token=7))
        elif name == "abort":
            carry_out(intake.abort(lease_id))
        elif name == "cancel":
            carry_out(intake.cancel(lease_id))
        elif name == "start-copy":
            running += intake.next_copies(number)
        elif name == "early-done":
            if begun:
                end_early(begun.pop(0))
        elif running:
            copy = running.pop(0)
            if name == "begin" and copy.early is not None:
                copy.early.token_id, copy.early.is_in_flight = 7, True
                begun.append(copy)
            carry_out(intake.copied(copy, is_valid=name != "void"))
    if is_link_lost:
        carry_out(intake.link_lost())
    for lease_id in told:
        carry_out(intake.abort(lease_id))
    while begun:
        end_early(begun.pop(0))
    while running or (fresh := intake.next_copies(4)):
        running += [] if running else fresh
        carry_out(intake.copied(running.pop(0), is_valid=True))
    assert intake.held == []
    assert sorted(room.free) == list(range(1, num_blocks + 1))
    if not is_link_lost:
        assert set(told.values()) <= {0}
