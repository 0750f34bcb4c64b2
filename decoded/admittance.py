"""Judges what prefilld says before it is believed: HELLO as a whole, and each message's numbers.

Pure.  The first difference that is found is named with both sides' values, so that whoever reads
the refusal knows what to change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from decoded.refusals import refuse
from protocol import messages as wire
from protocol.errors import InvalidMessageError
from protocol.limits import VERSION
from shared.daemon.fingerprint import first_difference
from shared.daemon.sampling import sampling_params
from shared.ops.token_bitmap import bitmap_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shared.kv.layout import KVLayout


def judge_hello(
    hello: wire.Hello,
    *,
    instance: wire.Instance,
    uid: int,
    allowed_uids: Collection[int],
    fields: Mapping[str, object],
    backend: str,
    device: str,
) -> wire.Refuse | None:
    """Return why a link is refused, or None.

    Args:
        hello: What prefilld says.
        instance: This process.
        uid: prefilld's user, as the kernel tells it.
        allowed_uids: Users whose prefilld may open the link.
        fields: What this daemon's fingerprint is made of.
        backend: What the pool is to be made of, `memfd` or `cuda`.
        device: The UUID of this daemon's GPU, or `cpu`.
    """
    theirs = hello.instance
    if uid not in allowed_uids:
        return refuse(
            "credentials",
            "uid",
            ours=", ".join(map(str, sorted(allowed_uids))),
            theirs=uid,
            message="run both daemons as one user"
            + (", or set [decoded] link_uid" if backend == "memfd" else ""),
        )
    if hello.version != VERSION:
        return refuse(
            "version",
            "version",
            ours=VERSION,
            theirs=hello.version,
            message="install the same kvpair for both daemons and restart them",
        )
    if theirs.boot_id != instance.boot_id:
        return refuse(
            "host",
            "boot_id",
            ours=instance.boot_id,
            theirs=theirs.boot_id,
            message="both daemons must run on one host: memory is not shared between two",
        )
    if theirs == instance:
        return refuse(
            "self-connect",
            "instance",
            ours=instance.pid,
            theirs=theirs.pid,
            message="[decoded] socket is this daemon's own",
        )
    if theirs.pid == instance.pid:
        return refuse(
            "same-pid",
            "pid",
            ours=instance.pid,
            theirs=theirs.pid,
            message="share the PID namespace, or start the daemons under an init",
        )
    if hello.backend != backend:
        return refuse(
            "backend",
            "backend",
            ours=backend,
            theirs=hello.backend,
            message="give both daemons one configuration: both on GPUs, or both on the CPU",
        )
    if backend == "cuda" and (refusal := _judge_gpu(hello, instance, device)) is not None:
        return refusal
    name = first_difference(fields, hello.fields)
    if name is not None:
        return refuse(
            "fingerprint",
            name,
            ours=fields.get(name, "absent"),
            theirs=hello.fields.get(name, "absent"),
            message="give both daemons the same configuration and model, and restart them",
        )
    return None


def _judge_gpu(hello: wire.Hello, instance: wire.Instance, device: str) -> wire.Refuse | None:
    """Judge what matters to CUDA IPC alone.

    Two PID namespaces are no reason as long as the pids differ as each process sees its own:
    memory has been opened across them.  Should it not open, `unmappable` names them.
    """
    if not hello.device.startswith(("GPU-", "MIG-")):
        return refuse(
            "invalid-message",
            "device",
            ours=device,
            theirs=hello.device,
            message="a GPU is named by its UUID; both daemons must run the same version",
        )
    if hello.instance.shm_device != instance.shm_device:
        return refuse(
            "shm",
            "shm_device",
            ours=instance.shm_device,
            theirs=hello.instance.shm_device,
            message="let both daemons see one /dev/shm: CUDA's events cross processes through it",
        )
    if device != hello.device and "MIG-" in (device[:4], hello.device[:4]):
        return refuse(
            "peer-access",
            "device",
            ours=device,
            theirs=hello.device,
            message="parts of GPUs cannot read each other; give both daemons one part, or two GPUs",
        )
    return None


def check_chunk(
    message: wire.Chunk, layout: KVLayout, num_slots: int, *, num_events: int = 0
) -> None:
    """Hold a CHUNK's numbers against the pool that MAP described.

    Raises:
        InvalidMessageError: A number is outside the pool or contradicts another.
    """
    _check_lease(message.slot, message.blocks, message.total_blocks, layout, num_slots)
    if message.first + len(message.blocks) > message.total_blocks:
        raise InvalidMessageError(
            f"chunk: {len(message.blocks)} blocks from {message.first} exceed "
            f"{message.total_blocks}"
        )
    if message.first_step is not None:
        _check_first_step(message, message.first_step, layout)
    if message.event is not None and message.event >= num_events:
        raise InvalidMessageError(f"event {message.event} is not in a ring of {num_events}")


def _check_first_step(message: wire.Chunk, step: wire.FirstStep, layout: KVLayout) -> None:
    num_named = message.first + len(message.blocks)
    if layout.num_blocks_for(step.num_tokens) != num_named or not step.num_tokens:
        raise InvalidMessageError(
            f"chunk: the first step is at {step.num_tokens}, but {num_named} blocks are named"
        )
    if layout.num_blocks_for(step.num_tokens + 1) > message.total_blocks:
        raise InvalidMessageError(
            f"chunk: {message.total_blocks} blocks have no room for a token at {step.num_tokens}"
        )
    if step.sampling.seed is None:
        raise InvalidMessageError("chunk: the first step's seed is not resolved")
    if sampling_params(step.sampling).is_adjusted:
        raise InvalidMessageError(
            "chunk: the first step's penalties or bias need what HANDOFF alone tells"
        )


def check_handoff(message: wire.Handoff, layout: KVLayout, num_slots: int, vocab_size: int) -> None:
    """Hold a HANDOFF's numbers against the pool, the model and each other.

    Raises:
        InvalidMessageError: A number is out of range or contradicts another.
    """
    _check_lease(message.slot, message.blocks, message.total_blocks, layout, num_slots)
    request = message.request
    if len(message.blocks) != layout.num_blocks_for(message.num_tokens) or not message.blocks:
        raise InvalidMessageError(
            f"handoff: {message.num_tokens} tokens do not fill {len(message.blocks)} blocks "
            f"of {layout.block_size}"
        )
    # The last id is sampled and not computed; all before it are in the blocks.
    if not request.ids or message.num_tokens != request.prompt_tokens + len(request.ids) - 1:
        raise InvalidMessageError(
            f"handoff: {request.prompt_tokens} prompt tokens and {len(request.ids)} of the answer "
            f"do not make {message.num_tokens} computed ones"
        )
    if message.total_blocks < layout.num_blocks_for(message.num_tokens + 1):
        raise InvalidMessageError(
            f"handoff: {message.total_blocks} blocks cannot hold {message.num_tokens} tokens and "
            "the next one"
        )
    if len(request.ids) >= request.max_tokens:
        raise InvalidMessageError(
            f"handoff: {len(request.ids)} of {request.max_tokens} tokens leave nothing to decode"
        )
    if request.delivered > len(request.ids):
        raise InvalidMessageError(
            f"handoff: {request.delivered} of {len(request.ids)} ids cannot have been delivered"
        )
    if request.sampling.seed is None:
        raise InvalidMessageError("handoff: the seed is not resolved")
    named = max([*request.ids, *request.stop_ids, *(e.id for e in request.sampling.logit_bias)])
    if named >= vocab_size:
        raise InvalidMessageError(
            f"handoff: token id {named} is outside the vocabulary of {vocab_size}"
        )
    _check_sampling(request, vocab_size)


def _check_sampling(request: wire.RequestState, vocab_size: int) -> None:
    """Hold what sampling depends on against the model and the answer so far."""
    if request.prompt_set and len(request.prompt_set) != bitmap_bytes(vocab_size):
        raise InvalidMessageError(
            f"handoff: a set of tokens of {len(request.prompt_set)} bytes is not one of a "
            f"vocabulary of {vocab_size}"
        )
    num_held = len(request.ids) - request.delivered if request.logprobs is not None else 0
    if len(request.held_logprobs) != num_held:
        raise InvalidMessageError(
            f"handoff: {len(request.held_logprobs)} log-probabilities of {num_held} held ids"
        )


def _check_lease(
    slot: int, blocks: list[int], total_blocks: int, layout: KVLayout, num_slots: int
) -> None:
    if slot >= num_slots:
        raise InvalidMessageError(f"slot {slot} is not on a control page of {num_slots}")
    if blocks and max(blocks) >= layout.num_blocks:
        raise InvalidMessageError(
            f"block {max(blocks)} is not in a pool of {layout.num_blocks} blocks"
        )
    if len(set(blocks)) != len(blocks):
        raise InvalidMessageError("a block is named twice")
    if len(blocks) > total_blocks:
        raise InvalidMessageError(f"{len(blocks)} blocks are named of {total_blocks} in all")
    if total_blocks < 1:
        raise InvalidMessageError("a sequence of no blocks cannot be")
