"""CHUNK and HANDOFF, built from a request and its lease; and how large a HANDOFF can become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import messages as wire
from protocol.codec import encode_message
from protocol.limits import MAX_RESIDUE_BYTES, MAX_TOP_LOGPROBS
from shared.daemon.sampling import sampling_params

if TYPE_CHECKING:
    from prefilld.request import Prompt, Request
    from shared.kv.leases import Lease


MIN_LEFT_TOKENS = 2
"""The first token and the one after it, which is decoded's first."""

LARGEST = (1 << 31) - 1
"""Stands for any block id or token id when a HANDOFF's size is judged."""

_LARGEST_LOGPROB = wire.TokenLogprob(
    logprob=-1.5,
    top_ids=[LARGEST] * MAX_TOP_LOGPROBS,
    top_logprobs=[-1.5] * MAX_TOP_LOGPROBS,
)
"""Stands for the first token's, the only one that may have to travel."""


def first_step(prompt: Prompt) -> wire.FirstStep | None:
    """Return what lets decoded begin before HANDOFF; None where it must know more, or is not asked.

    Penalties, bias and log-probabilities need what HANDOFF alone tells; the last token of an answer
    is prefilld's.
    """
    sampling = sampling_params(
        prompt.sampling, min_tokens=prompt.min_tokens, end_ids=prompt.stop_ids
    )
    is_plain = not sampling.is_adjusted and prompt.logprobs is None
    if not is_plain or prompt.max_tokens - len(prompt.resumed_ids) < MIN_LEFT_TOKENS:
        return None
    return wire.FirstStep(
        num_tokens=len(prompt.ids) + len(prompt.resumed_ids), sampling=prompt.sampling
    )


def chunk_message(
    request: Request,
    lease: Lease,
    epoch: bytes,
    *,
    num_complete: int,
    event: int | None,
    first_step: wire.FirstStep | None = None,
) -> wire.Chunk:
    """Return the CHUNK that names the blocks which may be pulled since the last one."""
    return wire.Chunk(
        epoch=epoch,
        lease=lease.lease_id,
        slot=lease.slot,
        generation=lease.generation,
        first=request.chunked_blocks,
        blocks=list(request.blocks[request.chunked_blocks : num_complete]),
        total_blocks=request.prompt.start_blocks,
        event=event,
        first_step=first_step,
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
        total_blocks=request.prompt.start_blocks,
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
        prefill_device_ns=request.prefill_device_ns,
    )


def largest_handoff_bytes(prompt: Prompt) -> int:
    """Return the most bytes that this request's HANDOFF can take."""
    request = wire.RequestState(
        id="i" * 64,
        prompt_tokens=LARGEST,
        cached_tokens=LARGEST,
        ids=[LARGEST] * (len(prompt.resumed_ids) + 1),
        delivered=LARGEST,
        resumed=LARGEST,
        max_tokens=prompt.max_tokens,
        min_tokens=prompt.min_tokens,
        sampling=prompt.sampling,
        prompt_set=prompt.prompt_set,
        logprobs=prompt.logprobs,
        held_logprobs=[] if prompt.logprobs is None else [_LARGEST_LOGPROB],
        stop=prompt.stop,
        stop_ids=prompt.stop_ids,
        stream=True,
        arrived_ns=1 << 62,
        started_ns=1 << 62,
        first_token_ns=1 << 62,
        prefill_device_ns=1 << 62,
    )
    handoff = wire.Handoff(
        epoch=bytes(16),
        lease=1 << 62,
        slot=LARGEST,
        generation=1 << 62,
        blocks=[LARGEST] * prompt.num_blocks,
        num_tokens=LARGEST,
        total_blocks=LARGEST,
        request=request,
        residue=bytes(MAX_RESIDUE_BYTES),
        sent_ns=1 << 62,
    )
    return len(encode_message(handoff))
