"""How decoded refuses a link: each reason with its code, both sides' values, and what to do."""

from __future__ import annotations

from protocol import messages as wire
from shared.kv.errors import MappingFault

UNMAPPABLE: dict[MappingFault, tuple[str, str]] = {
    MappingFault.HANDLE: ("handle", "restart both daemons: the handle is no living pool's"),
    MappingFault.SELF: (
        "same-pid",
        "give both daemons one PID namespace, or start each under an init",
    ),
    MappingFault.PEER: (
        "peer-access",
        "use one GPU for both daemons or another pair, and let both see both GPUs' device nodes",
    ),
    MappingFault.EVENTS: ("shm", "run both daemons as one user who sees one /dev/shm"),
}
"""Code and cure of what is wrong with a pool, where it is not its size."""


def refuse(code: str, field: str, *, ours: object, theirs: object, message: str) -> wire.Refuse:
    """Return a refusal.

    Args:
        code: One of `protocol.errors.CODES`.
        field: What differs or is wrong.
        ours: This daemon's value.
        theirs: prefilld's.
        message: What to do about it.
    """
    return wire.Refuse(code=code, field=field, ours=str(ours), theirs=str(theirs), message=message)


def link_busy(*, pid: int) -> wire.Refuse:
    """Return the refusal of a second link.

    Args:
        pid: prefilld's whose link lives.
    """
    return refuse(
        "link-busy",
        "peer",
        ours=pid,
        theirs="another",
        message=f"prefilld {pid} has the link; stop it first",
    )


def contradiction(text: str) -> wire.Refuse:
    """Return the refusal of a link whose messages contradict each other."""
    return refuse(
        "invalid-message",
        "message",
        ours="",
        theirs=text,
        message="prefilld contradicts itself; see its log, both must run the same version",
    )


def descriptors_lost() -> wire.Refuse:
    """Return the refusal of a MAP without its descriptors."""
    return refuse(
        "fd-lost",
        "descriptors",
        ours="0",
        theirs="2",
        message="decoded has no descriptor left; raise its limit (LimitNOFILE, ulimit -n)",
    )


def foreign_backend() -> wire.Refuse:
    """Return the refusal of a MAP whose pool is not in a memfd."""
    return refuse(
        "backend",
        "pool_handle",
        ours="memfd",
        theirs="a GPU's pool",
        message="set the same [pool] backend for both daemons",
    )


def foreign_gpu(*, ours: str, theirs: str) -> wire.Refuse:
    """Return the refusal of a pool that lies on a GPU which this machine does not have."""
    return refuse(
        "peer-access",
        "device",
        ours=ours,
        theirs=theirs,
        message="no such GPU is visible to decoded; see `nvidia-smi -L` where each daemon runs",
    )


def unmappable(
    text: str,
    fault: MappingFault = MappingFault.SIZE,
    *,
    drivers: tuple[str, str] = ("", ""),
) -> wire.Refuse:
    """Return the refusal of a pool that cannot be mapped.

    Args:
        text: Why.
        fault: What is wrong with it.
        drivers: The newest CUDA of decoded's driver and of prefilld's.  In two containers they may
            differ, which CUDA IPC mostly bears; where it does not, nobody would think of it.
    """
    code, cure = UNMAPPABLE.get(fault, ("size", "restart both daemons"))
    ours, theirs = drivers
    if ours != theirs:
        cure += "; or give both one driver"
        return refuse(
            code, "pool", ours=f"{text} (CUDA {ours})", theirs=f"CUDA {theirs}", message=cure
        )
    return refuse(code, "pool", ours=text, theirs="", message=cure)


def too_little_memory(text: str, *, gpu: str) -> wire.Refuse:
    """Return the refusal of a pool that decoded's GPU has no room to map, or its engine to read.

    Args:
        text: What failed, how much is free, and who holds the rest.
        gpu: UUID of decoded's GPU.
    """
    return refuse(
        "memory",
        "device",
        ours=f"{text} (on {gpu})",
        theirs="",
        message="end what holds the rest, or give both daemons a smaller memory_fraction",
    )


def too_slow(floor_gb_s: float, read_gb_s: float) -> wire.Refuse:
    """Return the refusal of a mapping that reads slower than any healthy one."""
    return refuse(
        "slow-link",
        "bandwidth_gb_s",
        ours=f"at least {floor_gb_s:g} ([link] min_bandwidth_gb_s)",
        theirs=f"{read_gb_s:.3g}",
        message="the path between the pools is not the one that was configured",
    )
