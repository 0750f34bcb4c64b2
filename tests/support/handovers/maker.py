"""The process that has the pool: prefilld's leases, page, events and allocator, and no model.

It writes random blocks by kernels on one stream and announces each chunk as soon as its event is
recorded; the last part of a prompt follows when the host has seen the stream arrive there, as it
does when prefilld reads the first token back.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.reduction import send_handle
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec.structs import replace

from protocol.messages import Map
from shared.engine.device_stream import DeviceStream
from shared.kv.allocator import BlockAllocator
from shared.kv.control_page import ControlPage
from shared.kv.cuda_ipc import CudaIpcPool
from shared.kv.lease_states import (
    Effect,
    FreeBlocks,
    PublishGeneration,
    SendAbort,
)
from shared.kv.leases import Lease, LeaseTable
from shared.kv.memfd import MemfdPool
from shared.kv.proof import pattern_bytes, write_pattern
from shared.ops.transfer import to_device
from tests.support.handovers.digests import block_digests, digest_factors, words_of
from tests.support.handovers.plan import (
    AbortTold,
    Answered,
    ChunkTold,
    Digests,
    HandoffTold,
    LinkLost,
    NoMore,
    Plan,
    PoolTold,
    Report,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from multiprocessing.connection import Connection

    from torch import Tensor

    from shared.engine.device_stream import Mark

SPIN_CYCLES_A_MS = 1_900_000
"""An H200 runs at up to 1.98 GHz; a slower clock only makes a spin longer."""

ABORTED_SHARE = 0.02
"""Of all prompts; they end after their first chunk."""

MAX_CUTS = 3
"""A prompt is written in up to so many parts and one."""

POLL_S = 20e-6
"""Pause between two looks at the stream."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Prompt:
    lease: Lease
    parts: deque[int]
    """Blocks of each part that is still to be written; the last one comes with the HANDOFF."""
    num_written: int = 0
    written: Mark | None = None
    """Where the stream is once all blocks are."""
    digests: list[Tensor] = field(default_factory=list)
    is_doomed: bool
    """It is aborted after its first chunk, if it has several."""


class Maker:
    """One run of the maker.

    Args:
        plan: What to do.
        link: To the taker.
    """

    def __init__(self, plan: Plan, link: Connection) -> None:
        self._plan, self._link = plan, link
        self._chance = random.Random(plan.seed)
        index = plan.maker_device
        device = torch.device("cpu") if index is None else torch.device("cuda", index)
        if index is not None:
            torch.cuda.set_device(index)
        self._pool = (
            MemfdPool.create(plan.layout)
            if index is None
            else CudaIpcPool.create(plan.layout, device=index)
        )
        self._words = words_of(self._pool.kv)
        self._stream = DeviceStream(device)
        self._factors = digest_factors(plan.layout, device)
        self._bits = torch.Generator(device).manual_seed(plan.seed)
        self._allocator = BlockAllocator(plan.layout.num_blocks)
        self._leases = LeaseTable(plan.layout.num_blocks)
        self._page = ControlPage.create(plan.layout.num_blocks)
        self._prompts: list[_Prompt] = []
        """Not handed off yet."""
        self._digests: dict[int, list[Tensor]] = {}
        """Of all that was handed off."""
        self._num_released = self._num_aborted = 0
        self._deadline_s = time.monotonic() + plan.timeout_s

    def run(self) -> Report:
        """Hand everything over, and return what was written.

        Raises:
            TimeoutError: The taker does not answer in time.
        """
        plan = self._plan
        self._tell_pool()
        each = plan.num_handovers // (plan.num_losses + 1)
        losses = deque(each * (number + 1) for number in range(plan.num_losses))
        while self._num_released < plan.num_handovers or len(self._leases):
            has_worked = self._take_answers()
            if losses and self._num_released >= losses[0]:
                losses.popleft()
                self._lose_link()
            has_worked |= self._go_on()
            if not has_worked:
                if time.monotonic() > self._deadline_s:
                    raise TimeoutError(f"{self._leases!r} after {plan.timeout_s:g} s")
                self._link.poll(POLL_S)
        self._link.send(NoMore())
        return Report(digests=self._read_digests(), num_aborted=self._num_aborted)

    # --- prompts -------------------------------------------------------------------------------

    def _go_on(self) -> bool:
        """Hand a prompt off, or write one part of one; False where all must wait."""
        num_begun = self._num_released + len(self._leases)
        if num_begun < self._plan.num_handovers and len(self._leases) < self._plan.max_leases:
            self._begin(is_doomed=self._chance.random() < ABORTED_SHARE)
        for prompt in self._prompts:
            if prompt.written is not None and prompt.written.is_passed():
                self._link.send(self._hand_off(prompt))
                return True
        writable = [prompt for prompt in self._prompts if prompt.parts]
        if writable:
            self._write_part(self._chance.choice(writable))
        return bool(writable)

    def _begin(self, *, is_doomed: bool) -> _Prompt:
        num_blocks = self._chance.randint(1, self._plan.max_blocks)
        cuts = self._chance.sample(range(1, num_blocks), k=min(num_blocks - 1, MAX_CUTS))
        sizes = np.diff([0, *sorted(cuts), num_blocks])
        lease, effects = self._leases.open("prompt", self._allocator.allocate(num_blocks))
        self._carry_out(effects)
        prompt = _Prompt(lease=lease, parts=deque(sizes.tolist()), is_doomed=is_doomed)
        self._prompts.append(prompt)
        return prompt

    def _write_part(self, prompt: _Prompt) -> None:
        """Enqueue the next part, and announce it unless it is the last."""
        lease, first = prompt.lease, prompt.num_written
        blocks = list(lease.blocks[first : first + prompt.parts.popleft()])
        event = None
        with self._stream.current():
            ids = self._write(blocks)
            if isinstance(self._pool, CudaIpcPool):
                event = self._pool.record(self._stream.handle)
            prompt.digests.append(block_digests(self._words, ids, self._factors))
        prompt.num_written += len(blocks)
        if not prompt.parts:
            prompt.written = self._stream.mark()
            return
        self._leases.chunk_sent(lease.lease_id)
        self._link.send(
            ChunkTold(
                lease_id=lease.lease_id,
                slot=lease.slot,
                generation=lease.generation,
                first=first,
                blocks=blocks,
                total=len(lease.blocks),
                event=event,
            )
        )
        if prompt.is_doomed:
            self._prompts.remove(prompt)
            self._num_aborted += 1
            self._carry_out(self._leases.abort(lease.lease_id))

    def _write(self, blocks: Sequence[int]) -> Tensor:
        """Enqueue random bits for some blocks, and return their ids on the device."""
        device = self._words.device
        ids = to_device(np.array(blocks), device)
        fresh = torch.empty(len(blocks), self._words.shape[1], dtype=torch.int64, device=device)
        fresh.random_(-(1 << 62), 1 << 62, generator=self._bits)
        if self._plan.spin_ms and device.type == "cuda":
            torch.cuda._sleep(int(self._plan.spin_ms * SPIN_CYCLES_A_MS))
        self._words.index_copy_(0, ids, fresh)
        return ids

    def _hand_off(self, prompt: _Prompt) -> HandoffTold:
        """Return the HANDOFF of a prompt that is written."""
        lease = prompt.lease
        self._prompts.remove(prompt)
        self._leases.handoff_sent(lease.lease_id)
        self._digests[lease.lease_id] = prompt.digests
        return HandoffTold(
            lease_id=lease.lease_id,
            slot=lease.slot,
            generation=lease.generation,
            blocks=list(lease.blocks),
        )

    def _lose_link(self) -> None:
        """Take everything back and write over it, while a HANDOFF is on its way."""
        prompt = self._begin(is_doomed=False)
        while prompt.parts:
            self._write_part(prompt)
        self._stream.synchronize()
        on_its_way = self._hand_off(prompt)
        lent = [lease.blocks for lease in self._leases]
        self._prompts.clear()
        for effect in self._leases.link_lost(peer_is_gone=True, now_s=0.0, grace_s=0.0):
            if isinstance(effect, PublishGeneration):
                self._page.publish(effect.slot, effect.generation)
        for blocks in lent:
            self._allocator.free(blocks)
            with self._stream.current():
                self._write(blocks)
        self._stream.synchronize()
        self._link.send(on_its_way)
        self._link.send(LinkLost())

    # --- the taker -----------------------------------------------------------------------------

    def _tell_pool(self) -> None:
        pool, layout = self._pool, self._plan.layout
        proof = write_pattern(pool, os.urandom(pattern_bytes(pool)))
        message = Map(
            pool_bytes=layout.pool_bytes,
            offset=0,
            num_blocks=layout.num_blocks,
            control_slots=self._page.num_slots,
            proof_bytes=pattern_bytes(pool),
        )
        descriptors = [self._page.export()]
        if isinstance(pool, CudaIpcPool):
            export = pool.export()
            message = replace(
                message,
                offset=export.offset,
                pool_handle=export.handle,
                event_handles=list(export.event_handles),
            )
        else:
            descriptors.insert(0, pool.export())
        self._link.send(PoolTold(message, proof, len(descriptors)))
        for descriptor in descriptors:
            send_handle(self._link, descriptor, None)
            os.close(descriptor)

    def _take_answers(self) -> bool:
        has_worked = False
        while self._link.poll():
            answer: Answered = self._link.recv()
            has_worked = True
            if answer.kind == "adopt":
                self._carry_out(self._leases.adopt(answer.lease_id))
            else:
                effects = self._leases.release(answer.lease_id)
                is_known = any(isinstance(effect, FreeBlocks) for effect in effects)
                self._num_released += is_known and answer.lease_id in self._digests
                self._carry_out(effects)
        return has_worked

    def _carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case PublishGeneration(slot=slot, generation=generation):
                    self._page.publish(slot, generation)
                case FreeBlocks(blocks=blocks):
                    self._allocator.free(blocks)
                case SendAbort(lease_id=lease_id):
                    self._link.send(AbortTold(lease_id))
                case _:
                    pass  # no clients here, and what came late does not matter

    def _read_digests(self) -> Digests:
        return {lease_id: torch.cat(parts).tolist() for lease_id, parts in self._digests.items()}
