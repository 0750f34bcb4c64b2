"""What can go wrong with the KV pool, and whose fault it is.

    KvError                              root
    ├── LayoutError                      a shape no pool can have; also a ConfigError
    ├── PoolAllocationError              the machine has no room; also EnvironmentUnsupportedError
    ├── PoolShortageError                others have the room now; also MemoryShortageError
    ├── PoolMappingError                 the peer's pool is not what it was said to be
    ├── UnknownSlotError                 a slot that the control page does not have
    ├── UnknownEventError                a slot that the ring of events does not have
    ├── CudaCallError                    a call to CUDA failed; the parent of the next four
    ├── CudaUnavailableError             for want of set-up; also EnvironmentUnsupportedError
    ├── CudaNotReadyError                the same, and may pass by itself
    ├── GpuMemoryError                   the GPU's memory is full; also MemoryShortageError
    ├── GpuFatalError                    the GPU is lost to this process, which must end
    ├── CopyError                        blocks that cannot be copied as asked
    ├── OutOfBlocksError                 nobody's fault: wait until blocks come back
    ├── NoSlotError                      nobody's fault: wait until a lease ends
    └── MisuseError                      a bug of ours
        ├── UnknownBlockError            a block id that the pool does not have
        ├── RepeatedBlockError           one block twice in one call
        ├── BlockMoveError               a double free, or another illegal move
        ├── HoldStateError               a step that a hold's state does not allow
        ├── LeaseStateError              a step that the lease's state does not allow
        ├── GenerationError              a generation that does not grow
        ├── IntegrityError               the books contradict each other
        ├── PoolClosedError              use after `close`
        └── PoolInUseError               `close` while tensors still look into the pool

Each keeps what its text is made of.
"""

from __future__ import annotations

import enum

from shared.errors import ConfigError, EnvironmentUnsupportedError, ExitCode, MemoryShortageError


class KvError(Exception):
    """Root of what the KV pool raises."""


class LayoutError(KvError, ConfigError, ValueError):
    """A field of a layout has a value that no pool can have."""

    def __init__(self, *, field: str, value: object, wants: str) -> None:
        super().__init__(f"the KV layout's {field} is {value!r}; it must be {wants}")
        self.field, self.value, self.wants = field, value, wants


class PoolAllocationError(KvError, EnvironmentUnsupportedError):
    """The machine cannot give the memory for a pool."""

    def __init__(self, *, num_bytes: int, reason: str, hint: str | None = None) -> None:
        super().__init__(f"cannot allocate a pool of {num_bytes} bytes: {reason}", hint=hint)
        self.num_bytes, self.reason = num_bytes, reason


class PoolShortageError(PoolAllocationError, MemoryShortageError):
    """The machine has the memory for a pool, and others hold it now."""

    exit_code = ExitCode.BUSY


class MappingFault(enum.Enum):
    """What is wrong with a descriptor or handle that should be a peer's pool or control page."""

    DESCRIPTOR = "descriptor"
    """It is closed, or not a memfd at all."""
    SEALS = "seals"
    """Its owner could still shrink it under the reader, who would die of SIGBUS."""
    SIZE = "size"
    """It is not as large as announced, or as the layout needs."""
    MAP = "map"
    """The kernel or the driver would not map it."""
    HANDLE = "handle"
    """The driver knows of no memory by this handle, in this form."""
    SELF = "self"
    """The driver takes the handle for this process's own: equal pids in two namespaces do that."""
    PEER = "peer"
    """This GPU cannot reach the one that the memory lies on."""
    EVENTS = "events"
    """The memory opens and its events do not, as where /dev/shm is not shared."""


class PoolMappingError(KvError):
    """A descriptor or handle cannot be mapped as what its sender said it is; nothing was mapped."""

    def __init__(self, *, fault: MappingFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class UnknownSlotError(KvError, IndexError):
    """A lease slot lies outside the control page; where it came off the wire, the peer's fault."""

    def __init__(self, *, slot: int, num_slots: int) -> None:
        super().__init__(f"slot {slot} is not on a control page of {num_slots} slots")
        self.slot, self.num_slots = slot, num_slots


class UnknownEventError(KvError, IndexError):
    """An event slot lies outside the ring; where it came off the wire, the peer's fault."""

    def __init__(self, *, slot: int, num_events: int) -> None:
        super().__init__(f"event {slot} is not in a ring of {num_events}")
        self.slot, self.num_events = slot, num_events


class CudaCallError(KvError):
    """A call to CUDA failed.  `cuda_status.cuda_error` chooses the class by the status.

    The status is None where it never came to a call.
    """

    def __init__(
        self, *, call: str, status: int | None, meaning: str, hint: str | None = None
    ) -> None:
        code = "" if status is None else f" with CUDA error {status}"
        super().__init__(f"{call} failed{code}: {meaning}")
        self.call, self.status, self.meaning, self.hint = call, status, meaning, hint

    def __str__(self) -> str:
        text = str(self.args[0])
        return text if self.hint is None else f"{text}; {self.hint}"


class CudaUnavailableError(CudaCallError, EnvironmentUnsupportedError):
    """The GPU cannot be used as this machine is set up; the hint says what to change."""


class CudaNotReadyError(CudaUnavailableError):
    """The GPU cannot be used yet, or while others use it: the same start may work in a while."""

    exit_code = ExitCode.BUSY


class GpuMemoryError(CudaCallError, MemoryShortageError):
    """A call found too little of the GPU's memory free.  It took none; other calls go on."""

    exit_code = ExitCode.BUSY


class GpuFatalError(CudaCallError):
    """The GPU is lost to this process: every later call fails as well, and nothing mends it.

    Fail what is in flight, tell the peer, and end the process with a status that is not zero.
    """


class CopyError(KvError, ValueError):
    """Blocks cannot be copied as asked; none was.  Ids off the wire are the peer's fault."""


class OutOfBlocksError(KvError):
    """Fewer blocks are free than were asked for; none was taken."""

    def __init__(self, *, requested: int, free: int, total: int) -> None:
        super().__init__(f"{requested} blocks were asked for, {free} of {total} are free")
        self.requested, self.free, self.total = requested, free, total


class NoSlotError(KvError):
    """Every slot of the control page belongs to a lease that has not ended."""

    def __init__(self, *, num_slots: int) -> None:
        super().__init__(f"all {num_slots} lease slots are taken")
        self.num_slots = num_slots


class MisuseError(KvError):
    """The caller broke a contract: a bug of ours, never a peer's or a user's doing."""


class UnknownBlockError(MisuseError, IndexError):
    """A block id lies outside the pool."""

    def __init__(self, *, block: int, num_blocks: int) -> None:
        super().__init__(f"block {block} is not in a pool of {num_blocks} blocks")
        self.block, self.num_blocks = block, num_blocks


class RepeatedBlockError(MisuseError, ValueError):
    """One call names a block twice."""

    def __init__(self, *, block: int, state: str) -> None:
        super().__init__(f"block {block} ({state}) is named twice in one call")
        self.block, self.state = block, state


class BlockMoveError(MisuseError, ValueError):
    """A block may not go from the state it is in to the one asked for."""

    def __init__(self, *, block: int, state: str, to: str) -> None:
        super().__init__(f"block {block} is {state} and cannot become {to}")
        self.block, self.state, self.to = block, state, to


class HoldStateError(MisuseError):
    """A hold was dropped twice, or is to become what it may not become from where it is."""

    def __init__(self, *, state: str, to: str) -> None:
        super().__init__(f"a hold that is {state} must not become {to}")
        self.state, self.to = state, to


class LeaseStateError(MisuseError):
    """A step was reported for a lease that is not in a state to take it."""

    def __init__(self, *, lease_id: int, state: str, event: str) -> None:
        super().__init__(f"lease {lease_id} is {state}; {event} cannot happen to it")
        self.lease_id, self.state, self.event = lease_id, state, event


class GenerationError(MisuseError, ValueError):
    """A generation must be larger than every earlier one of its slot."""

    def __init__(self, *, slot: int, current: int, generation: int) -> None:
        super().__init__(f"slot {slot} is at generation {current}; it cannot go to {generation}")
        self.slot, self.current, self.generation = slot, current, generation


class IntegrityError(MisuseError):
    """The books contradict each other: some block or slot is lost, or in two hands."""


class PoolClosedError(MisuseError):
    """The pool's memory was asked for after `close`."""

    def __init__(self, *, what: str) -> None:
        super().__init__(f"{what} is closed")
        self.what = what


class PoolInUseError(MisuseError):
    """Tensors still look into a pool that is being closed; it stays mapped until they are gone."""

    def __init__(self, *, what: str) -> None:
        super().__init__(f"{what} cannot be unmapped while tensors look into it; drop them first")
        self.what = what
