"""The process that pulls: decoded's book of leases, mapping and turns, and nothing to decode."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.reduction import recv_handle
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from decoded.intake import Intake
from decoded.lease_effects import (
    BlockCopy,
    Effect,
    Lost,
    Pulled,
    SendAdopt,
    SendNoChunk,
    SendReject,
    SendRelease,
    Unreserve,
)
from decoded.overlapped_turns import OverlappedTurns
from decoded.turns import CopyJob
from protocol.descriptors import close_all
from shared.daemon.devices import Device
from shared.engine.block_puller import CudaPuller, EagerPuller
from shared.engine.device_stream import DeviceStream
from shared.kv.allocator import BlockAllocator
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.pool import LocalPool
from shared.ops.transfer import to_device
from tests.support.handovers.digests import block_digests, digest_factors, words_of
from tests.support.handovers.plan import (
    AbortTold,
    Answered,
    ChunkTold,
    HandoffTold,
    LinkLost,
    NoMore,
    Plan,
    PoolTold,
    Report,
)
from tests.support.handovers.readings import POOLS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from decoded.link import LinkSession
    from decoded.mapping import PeerPool
    from decoded.turns import CopyDone
    from shared.engine.collected import Collected
    from shared.engine.decoding import DecodeStep, PreparedStep
    from shared.engine.device_stream import Mark

POLL_S = 20e-6
"""Pause between two looks at copies."""

MAX_COPY_BLOCKS = 64
"""Blocks that are given to the engine in one turn, of all leases."""


class _NothingToDecode:
    """A decoder without sequences."""

    depth = 1
    num_in_flight = 0

    def set_peer(self, kv: Tensor | None) -> None:
        raise NotImplementedError

    def prepare(self, step: DecodeStep) -> PreparedStep:
        raise NotImplementedError

    def launch(self, steps: Sequence[DecodeStep]) -> None:
        raise NotImplementedError

    def is_done(self) -> bool:
        return False

    def collect(self) -> Collected[int]:
        raise NotImplementedError


@dataclass(eq=False)
class _Session:
    """What turns ask of a link."""

    peer_pool: PeerPool
    intake: Intake[int]
    """A request is its lease's id here."""
    is_lost: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Digested:
    """Pulled blocks whose digests are on their way; until then nobody may write them."""

    lease_id: int
    blocks: list[int]
    digests: Tensor
    mark: Mark


class Taker:
    """One run of the taker.

    Args:
        plan: What is to come.
        link: From the maker.
    """

    def __init__(self, plan: Plan, link: Connection) -> None:
        self._plan, self._link = plan, link
        index = plan.taker_device
        torch_device = torch.device("cpu") if index is None else torch.device("cuda", index)
        self._device = Device(name=str(torch_device), index=index)
        if index is not None:
            torch.cuda.set_device(index)
        pool = (
            LocalPool(plan.layout)
            if index is None
            else LocalCudaPool.create(plan.layout, device=index)
        )
        self._words = words_of(pool.kv)
        self._factors = digest_factors(plan.layout, torch_device)
        self._stream = DeviceStream(torch_device)
        self._turns = OverlappedTurns(
            _NothingToDecode(),
            EagerPuller(pool.kv) if index is None else CudaPuller(pool.kv),
            event_timeout_s=plan.timeout_s,
        )
        self._allocator = BlockAllocator(plan.layout.num_blocks)
        self._digested: deque[_Digested] = deque()
        self._digests: dict[int, Tensor] = {}
        self._sessions: list[_Session] = []
        self._num_voided = 0
        self._has_all = False
        self._deadline_s = time.monotonic() + plan.timeout_s

    def run(self) -> Report:
        """Take everything over, and return what was read.

        Raises:
            TimeoutError: The maker does not go on in time.
        """
        self._sessions.append(self._new_session(self._map()))
        while not self._has_all or not all(each.intake.is_empty for each in self._sessions):
            if time.monotonic() > self._deadline_s:
                raise TimeoutError(f"not everything came within {self._plan.timeout_s:g} s")
            self._listen()
            self._copy()
        while self._digested:
            self._collect_digest()
        return Report(
            digests={lease_id: each.tolist() for lease_id, each in self._digests.items()},
            num_voided=self._num_voided,
        )

    # --- the link ------------------------------------------------------------------------------

    def _map(self) -> PeerPool:
        """Map the maker's pool and hold it against the proof."""
        told: PoolTold = self._link.recv()
        fds = [recv_handle(self._link) for _ in range(told.num_descriptors)]
        try:
            kind = POOLS[self._plan.reading]
            pool = kind(told.message, fds, self._plan.layout, self._device)
        finally:
            close_all(fds)
        if pool.digest != told.proof:
            raise ValueError("the mapping shows another pool than the maker's")
        return pool

    def _new_session(self, pool: PeerPool) -> _Session:
        return _Session(pool, Intake(reserve=self._reserve))

    def _listen(self) -> None:
        """Take what the maker has told; waits a moment where there is nothing to do."""
        is_busy = any(not each.intake.is_empty for each in self._sessions)
        while not self._has_all and self._link.poll(0 if is_busy else POLL_S):
            self._take(self._link.recv())
            is_busy = True

    def _take(self, told: object) -> None:
        session = self._sessions[-1]
        match told:
            case ChunkTold():
                effects = session.intake.chunk(
                    lease_id=told.lease_id,
                    slot=told.slot,
                    generation=told.generation,
                    first=told.first,
                    blocks=told.blocks,
                    total=told.total,
                    event=told.event,
                )
            case HandoffTold():
                effects = session.intake.handoff(
                    lease_id=told.lease_id,
                    slot=told.slot,
                    generation=told.generation,
                    blocks=told.blocks,
                    total=len(told.blocks),
                    request=told.lease_id,
                )
            case AbortTold(lease_id=lease_id):
                effects = session.intake.abort(lease_id)
            case LinkLost():
                session.is_lost = True
                effects = session.intake.link_lost()
                self._sessions.append(self._new_session(session.peer_pool))
            case NoMore():
                self._has_all, effects = True, []
            case _:
                raise TypeError(f"{told!r} was not expected")
        self._carry_out(effects)

    # --- copies --------------------------------------------------------------------------------

    def _copy(self) -> None:
        """Give blocks to the engine, and take note of what it has copied."""
        for session in self._sessions:
            for copy in session.intake.next_copies(MAX_COPY_BLOCKS):
                if session.peer_pool.is_valid(copy):
                    self._turns.submit(CopyJob(session=cast("LinkSession", session), copy=copy))
                else:
                    self._carry_out(session.intake.copied(copy, is_valid=False))
        self._turns.interrupt()  # more may have been told by the time the first copy is complete
        for done in self._turns.take([]).copies:
            self._copied(done)
        self._sessions = [
            each for each in self._sessions if not (each.is_lost and each.intake.is_empty)
        ]

    def _copied(self, done: CopyDone) -> None:
        session = cast("_Session", done.job.session)
        copy: BlockCopy = done.job.copy
        is_valid = done.is_complete and session.peer_pool.is_valid(copy)
        self._carry_out(session.intake.copied(copy, is_valid=is_valid))

    def _carry_out(self, effects: Iterable[Effect[int]]) -> None:
        for effect in effects:
            match effect:
                case SendAdopt(lease_id=lease_id):
                    self._link.send(Answered("adopt", lease_id))
                case SendRelease(lease_id=lease_id):
                    self._link.send(Answered("release", lease_id))
                case Unreserve(blocks=blocks):
                    self._allocator.free(blocks)
                case Pulled(request=lease_id, blocks=blocks):
                    self._digest(lease_id, blocks)
                case Lost():
                    self._num_voided += 1
                case SendReject() | SendNoChunk():
                    raise AssertionError(f"{effect!r}: there is room for all that may be lent")
                case _:
                    pass  # what came too late does not matter

    # --- digests -------------------------------------------------------------------------------

    def _reserve(self, num_blocks: int) -> list[int]:
        """Take blocks, once those before have been read."""
        while self._digested and (
            self._digested[0].mark.is_passed() or self._allocator.num_free < num_blocks
        ):
            self._collect_digest()
        return self._allocator.allocate(num_blocks)

    def _digest(self, lease_id: int, blocks: list[int]) -> None:
        """Enqueue what reads the blocks of a lease that are all here."""
        with self._stream.current():
            ids = to_device(np.array(blocks), self._words.device)
            digests = block_digests(self._words, ids, self._factors)
        self._digested.append(_Digested(lease_id, blocks, digests, self._stream.mark()))

    def _collect_digest(self) -> None:
        oldest = self._digested.popleft()
        oldest.mark.wait()
        self._allocator.free(oldest.blocks)
        self._digests[oldest.lease_id] = oldest.digests
