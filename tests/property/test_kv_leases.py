"""Both sides of a lease over a channel that loses, doubles and reorders, with deaths in between.

prefilld's side is the real lease table and the real books of blocks, with requests that share what
the prefix cache knows; what the table returns is carried out on a model of the control page.
decoded's side is a model that reads blocks a piece at a time and, as decoded must, keeps what it
read only if the generation still stands afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.block_hashes import block_hashes
from shared.kv.errors import NoSlotError
from shared.kv.holds import BlockHolds, Hold
from shared.kv.lease_states import (
    CloseClient,
    Effect,
    FreeBlocks,
    Ignored,
    LeaseEvent,
    LeaseState,
    PublishGeneration,
    Quarantine,
    ReturnRequest,
    SendAbort,
)
from shared.kv.leases import Lease, LeaseTable

NUM_BLOCKS = 10
NUM_SLOTS = 3
GRACE_S = 10.0

BLOCK_STATES = {LeaseState.QUARANTINED: BlockState.QUARANTINED}
"""The state of a lease's blocks; in all other states they are LEASED."""

STRENGTH = (BlockState.QUARANTINED, BlockState.LEASED, BlockState.ACTIVE)
"""A block that several requests share is in the first of these that one of them is in."""

MAY_CHUNK = (LeaseState.OPEN, LeaseState.CHUNKED)
MAY_HANDOFF = (*MAY_CHUNK, LeaseState.DECLINED)

ANSWERS = [LeaseEvent.NOCHUNK, LeaseEvent.ADOPT, LeaseEvent.REJECT, LeaseEvent.RELEASE]


@dataclass
class Request:
    """A request of prefilld's with its blocks, a token each."""

    tokens: list[int]
    hold: Hold
    lease_id: int | None = None


@dataclass
class Copy:
    """decoded's copy of a lease's blocks while it is under way."""

    lease: Lease
    read: list[tuple[int, ...] | None] = field(default_factory=list)


class LeaseMachine(RuleBasedStateMachine):
    """One pair of daemons; decoded may die and come back, and the link with it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.num_requests = 0
        # prefilld
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.holds = BlockHolds(self.allocator, block_size=1)
        self.table = LeaseTable(NUM_SLOTS)
        self.page = [0] * NUM_SLOTS
        self.requests: dict[str, Request] = {}
        self.opened: dict[int, Lease] = {}
        self.lent: dict[int, Request] = {}
        """By lease; also after its end."""
        self.contents: dict[int, tuple[int, ...]] = {}
        """Which tokens' cache each block holds, the whole prefix; written when it is allocated."""
        # what the effects were, lease by lease
        self.ends: dict[int, int] = {}
        self.closed_clients: set[int] = set()
        self.aborts: set[int] = set()
        self.quarantined: set[int] = set()
        # the link, and decoded
        self.link_is_up = True
        self.peer_is_alive = True
        self.to_peer: list[tuple[str, int]] = []
        self.to_prefilld: list[tuple[LeaseEvent, int]] = []
        self.held: set[int] = set()
        self.adopted: set[int] = set()
        self.copies: list[Copy] = []

    # --- carrying effects out -----------------------------------------------------------

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Do what the table says, and check that each step is safe at that moment."""
        for effect in effects:
            match effect:
                case PublishGeneration(slot, generation):
                    assert generation > self.page[slot]
                    self.page[slot] = generation
                case FreeBlocks(lease_id, blocks):
                    self.check_end(lease_id)
                    self.check_given_back(lease_id)
                    assert blocks == self.lent[lease_id].hold.blocks
                    self.holds.drop(self.lent[lease_id].hold)
                    del self.requests[self.opened[lease_id].request_id]
                case ReturnRequest(lease_id, request_id):
                    self.check_end(lease_id)
                    request = self.requests[request_id]
                    assert request.lease_id == lease_id
                    assert lease_id not in self.closed_clients
                    request.lease_id = None
                    self.holds.move(request.hold, BlockState.ACTIVE)
                case Quarantine(lease_id, blocks):
                    self.check_revoked(lease_id)
                    self.quarantined.add(lease_id)
                    assert blocks == self.lent[lease_id].hold.blocks
                    self.holds.move(self.lent[lease_id].hold, BlockState.QUARANTINED)
                case SendAbort(lease_id):
                    assert lease_id not in self.aborts
                    assert self.link_is_up
                    self.aborts.add(lease_id)
                    self.to_peer.append(("abort", lease_id))
                case CloseClient(lease_id):
                    assert lease_id not in self.closed_clients
                    self.closed_clients.add(lease_id)
                case Ignored():
                    pass

    def check_revoked(self, lease_id: int) -> None:
        """Nobody who reads under this lease can believe what it reads."""
        lease = self.opened[lease_id]
        assert self.page[lease.slot] > lease.generation

    def check_given_back(self, lease_id: int) -> None:
        """While the link stands, the peer's word is waited for and the fence is not needed."""
        if self.link_is_up and lease_id not in self.quarantined:
            assert lease_id not in self.held
            assert not {("chunk", lease_id), ("handoff", lease_id)} & {*self.to_peer}

    def check_end(self, lease_id: int) -> None:
        """A lease ends once, and after its revocation."""
        self.check_revoked(lease_id)
        self.ends[lease_id] = self.ends.get(lease_id, 0) + 1
        assert self.ends[lease_id] == 1
        assert self.table.get(lease_id) is None

    def leases_in(self, *states: LeaseState) -> list[int]:
        """Return the live leases that are in one of some states."""
        return [lease.lease_id for lease in self.table if lease.state in states]

    def unlent(self) -> list[str]:
        """Return the requests that prefilld has to itself."""
        return [key for key, request in self.requests.items() if request.lease_id is None]

    # --- prefilld -----------------------------------------------------------------------

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def admit(self, tokens: list[int]) -> None:
        """A request gets its blocks, and its cache is written over what lay in the fresh ones."""
        hold = self.holds.take(len(tokens), block_hashes(tokens, block_size=1, root=b""))
        if hold is None:
            return
        self.num_requests += 1
        self.requests[f"r{self.num_requests}"] = Request(tokens, hold)
        for index in range(hold.cached_tokens, len(tokens)):
            self.contents[hold.blocks[index]] = tuple(tokens[: index + 1])
        self.holds.computed(hold, len(tokens))

    @precondition(lambda self: self.link_is_up and self.unlent())
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """A request that is not lent is lent, if a slot is free."""
        request_id = data.draw(st.sampled_from(self.unlent()))
        request = self.requests[request_id]
        try:
            lease, effects = self.table.open(request_id, request.hold.blocks)
        except NoSlotError:
            assert len(self.table) == NUM_SLOTS
            return
        self.carry_out(effects)
        assert self.page[lease.slot] == lease.generation
        assert lease.lease_id not in self.opened
        self.opened[lease.lease_id] = lease
        request.lease_id = lease.lease_id
        self.lent[lease.lease_id] = request
        self.holds.move(request.hold, BlockState.LEASED)

    @precondition(lambda self: self.link_is_up and self.leases_in(*MAY_CHUNK))
    @rule(data=st.data())
    def send_chunk(self, data: st.DataObject) -> None:
        """A part of the prompt is ready to be pulled."""
        lease_id = data.draw(st.sampled_from(self.leases_in(*MAY_CHUNK)))
        self.table.chunk_sent(lease_id)
        self.to_peer.append(("chunk", lease_id))

    @precondition(lambda self: self.link_is_up and self.leases_in(*MAY_HANDOFF))
    @rule(data=st.data())
    def send_handoff(self, data: st.DataObject) -> None:
        """The first token is known."""
        lease_id = data.draw(st.sampled_from(self.leases_in(*MAY_HANDOFF)))
        self.table.handoff_sent(lease_id)
        self.to_peer.append(("handoff", lease_id))

    @precondition(lambda self: self.link_is_up and self.leases_in(*LeaseState))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """The request is over, at any point of its life."""
        self.carry_out(self.table.abort(data.draw(st.sampled_from(self.leases_in(*LeaseState)))))

    @precondition(lambda self: self.unlent())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """A request that is not lent ends by itself."""
        request_id = data.draw(st.sampled_from(self.unlent()))
        self.holds.drop(self.requests.pop(request_id).hold)

    @rule(seconds=st.floats(0.0, 6.0))
    def tick(self, seconds: float) -> None:
        """Time passes, and quarantine may be over."""
        self.now_s += seconds
        self.carry_out(self.table.expire(self.now_s))
        assert self.table.expire(self.now_s) == [], "once is enough"

    # --- the channel to prefilld --------------------------------------------------------

    @precondition(lambda self: self.to_prefilld)
    @rule(data=st.data(), keep=st.booleans())
    def deliver(self, data: st.DataObject, *, keep: bool) -> None:
        """Any message arrives, in any order; it may arrive again later."""
        index = data.draw(st.integers(0, len(self.to_prefilld) - 1))
        event, lease_id = self.to_prefilld[index]
        if not keep:
            del self.to_prefilld[index]
        self.receive(event, lease_id)

    @precondition(lambda self: self.to_prefilld)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """A message never arrives."""
        del self.to_prefilld[data.draw(st.integers(0, len(self.to_prefilld) - 1))]

    @precondition(lambda self: self.link_is_up)
    @rule(lease_id=st.integers(0, 12))
    def receive_nonsense(self, lease_id: int) -> None:
        """A message names a lease that ended or never was."""
        if self.table.get(lease_id) is None:
            for event in ANSWERS:
                self.receive(event, lease_id)

    def receive(self, event: LeaseEvent, lease_id: int) -> None:
        """One message of decoded's reaches the table."""
        known = self.table.get(lease_id) is not None
        answers = {
            LeaseEvent.NOCHUNK: self.table.nochunk,
            LeaseEvent.ADOPT: self.table.adopt,
            LeaseEvent.REJECT: self.table.reject,
            LeaseEvent.RELEASE: self.table.release,
        }
        effects = answers[event](lease_id)
        assert known or effects == [Ignored(event, lease_id)]
        self.carry_out(effects)

    # --- decoded ------------------------------------------------------------------------

    @precondition(lambda self: self.to_peer)
    @rule(takes=st.booleans())
    def peer_reads_a_message(self, *, takes: bool) -> None:
        """The peer takes what it is offered, or does not; every ABORT gets one RELEASE."""
        kind, lease_id = self.to_peer.pop(0)
        match kind:
            case "chunk" if takes:
                self.held.add(lease_id)
            case "chunk" if lease_id not in self.held:
                self.to_prefilld.append((LeaseEvent.NOCHUNK, lease_id))
            case "handoff" if takes:
                self.held.add(lease_id)
                self.adopted.add(lease_id)
                self.to_prefilld.append((LeaseEvent.ADOPT, lease_id))
            case "handoff":
                self.peer_drops(lease_id)
                self.to_prefilld.append((LeaseEvent.REJECT, lease_id))
            case "abort":
                self.peer_drops(lease_id)
                self.to_prefilld.append((LeaseEvent.RELEASE, lease_id))

    def peer_drops(self, lease_id: int) -> None:
        """The peer stops reading under a lease, once its copy in flight has ended."""
        for copy in [copy for copy in self.copies if copy.lease.lease_id == lease_id]:
            self.finish_copy(copy)
        self.held.discard(lease_id)
        self.adopted.discard(lease_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def peer_begins_a_copy(self, data: st.DataObject) -> None:
        """It checks the generation before it reads."""
        lease = self.opened[data.draw(st.sampled_from(sorted(self.held)))]
        if self.page[lease.slot] == lease.generation:
            self.copies.append(Copy(lease))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def peer_copies_a_block(self, data: st.DataObject) -> None:
        """Between two blocks anything may happen."""
        copy = data.draw(st.sampled_from(self.copies))
        if len(copy.read) < len(copy.lease.blocks):
            copy.read.append(self.contents.get(copy.lease.blocks[len(copy.read)]))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def peer_finishes_a_copy(self, data: st.DataObject) -> None:
        """It checks the generation once more, and releases what it adopted."""
        copy = data.draw(st.sampled_from(self.copies))
        lease_id = copy.lease.lease_id
        self.finish_copy(copy)
        if lease_id in self.adopted:
            self.peer_drops(lease_id)
            if self.link_is_up:
                self.to_prefilld.append((LeaseEvent.RELEASE, lease_id))

    def finish_copy(self, copy: Copy) -> None:
        """What passes the fence is the request's own cache, every block of it."""
        self.copies.remove(copy)
        rest = copy.lease.blocks[len(copy.read) :]
        copy.read += [self.contents.get(block) for block in rest]
        if self.page[copy.lease.slot] == copy.lease.generation:
            tokens = self.lent[copy.lease.lease_id].tokens
            assert copy.read == [tuple(tokens[: end + 1]) for end in range(len(tokens))]

    # --- deaths -------------------------------------------------------------------------

    @precondition(lambda self: self.link_is_up)
    @rule(peer_dies=st.booleans(), is_proved=st.booleans())
    def link_breaks(self, *, peer_dies: bool, is_proved: bool) -> None:
        """The queue was read as far as `deliver` came; the rest is lost with the link."""
        self.link_is_up = False
        self.to_peer.clear()
        self.to_prefilld.clear()
        if peer_dies:
            self.peer_ends()
        self.carry_out(
            self.table.link_lost(
                peer_is_gone=peer_dies and is_proved, now_s=self.now_s, grace_s=GRACE_S
            )
        )
        in_doubt = {lease.state for lease in self.table}
        assert in_doubt <= {LeaseState.QUARANTINED}
        assert not (peer_dies and is_proved and in_doubt)

    def peer_ends(self) -> None:
        """A dead process reads nothing and holds nothing."""
        self.peer_is_alive = False
        self.copies.clear()
        self.held.clear()
        self.adopted.clear()

    @precondition(lambda self: not self.link_is_up)
    @rule()
    def peer_is_proved_dead(self) -> None:
        """The proof may come long after the link."""
        self.peer_ends()
        self.carry_out(self.table.peer_gone())
        assert len(self.table) == 0

    @precondition(lambda self: not self.link_is_up)
    @rule()
    def link_comes_back(self) -> None:
        """To the same decoded with what it still holds, or to a new one with nothing."""
        self.link_is_up = self.peer_is_alive = True
        kept = self.held & {lease.lease_id for lease in self.table}
        self.carry_out(self.table.link_restored(frozenset(self.held)))
        assert {lease.lease_id for lease in self.table} == kept

    # --- what always holds --------------------------------------------------------------

    @invariant()
    def the_blocks_add_up(self) -> None:
        """Each block counts once, and each is in the hands that the lease says."""
        self.holds.check_integrity()
        self.table.check_integrity()
        counts = self.allocator.counts()
        parts = (counts.free, counts.cached, counts.active, counts.leased, counts.quarantined)
        assert sum(parts) + counts.reserved == counts.total == NUM_BLOCKS

        hands: dict[int, set[BlockState]] = {}
        for request_id, request in self.requests.items():
            lease = None if request.lease_id is None else self.table.get(request.lease_id)
            assert (lease is None) is (request.lease_id is None)
            if lease is None:
                expected = BlockState.ACTIVE
            else:
                assert lease.request_id == request_id
                expected = BLOCK_STATES.get(lease.state, BlockState.LEASED)
            for block in request.hold.blocks:
                hands.setdefault(block, set()).add(expected)
        assert len(hands) == counts.active + counts.leased + counts.quarantined
        for block, states in hands.items():
            strongest = next(state for state in STRENGTH if state in states)
            assert self.allocator.state(block) is strongest

    def teardown(self) -> None:
        """Once all is quiet nothing is lent, nothing is lost, and every lease ended once."""
        if self.link_is_up:
            self.link_breaks(peer_dies=False, is_proved=False)
        self.tick(2 * GRACE_S)
        assert len(self.table) == 0
        assert self.ends == dict.fromkeys(self.opened, 1)
        for request in self.requests.values():
            assert request.lease_id is None
            self.holds.drop(request.hold)
        counts = self.allocator.counts()
        assert counts.free + counts.cached == NUM_BLOCKS - 1


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(
    max_examples=200, stateful_step_count=60, derandomize=True, deadline=None
)
