"""CHUNK and HANDOFF, built from a request and its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as wire

if TYPE_CHECKING:
    from prefilld.request import Request
    from shared.kv.leases import Lease


def chunk_message(
    request: Request, lease: Lease, epoch: bytes, *, num_complete: int, event: int | None
) -> wire.Chunk:
    """Return the CHUNK that names the blocks which may be pulled since the last one."""
    return wire.Chunk(
        epoch=epoch,
        lease=lease.lease_id,
        slot=lease.slot,
        generation=lease.generation,
        first=request.chunked_blocks,
        blocks=list(request.blocks[request.chunked_blocks : num_complete]),
        total_blocks=request.prompt.total_blocks,
        event=event,
    )


def handoff_message(
    request: Request, lease: Lease, epoch: bytes, *, residue: bytes
) -> wire.Handoff:
    """Return the HANDOFF of a request whose first token is known."""
    return wire.Handoff(
        epoch=epoch,
        lease=lease.lease_id,
        slot=lease.slot,
        generation=lease.generation,
        blocks=list(request.blocks),
        num_tokens=request.num_tokens,
        total_blocks=request.prompt.total_blocks,
        request=_state_of(request),
        residue=residue,
        sent_ns=request.sent_ns,
    )


def _state_of(request: Request) -> wire.RequestState:
    prompt = request.prompt
    return wire.RequestState(
        id=request.id,
        prompt_tokens=len(prompt.ids),
        cached_tokens=request.cached_tokens,
        ids=request.answer_ids,
        delivered=request.delivered,
        resumed=len(prompt.resumed_ids),
        max_tokens=prompt.max_tokens,
        min_tokens=prompt.min_tokens,
        sampling=prompt.sampling,
        prompt_set=prompt.prompt_set,
        logprobs=prompt.logprobs,
        held_logprobs=request.held_logprobs,
        stop=prompt.stop,
        stop_ids=prompt.stop_ids,
        stream=prompt.stream,
        arrived_ns=request.arrived_ns,
        started_ns=request.started_ns,
        first_token_ns=request.first_token_ns,
    )
