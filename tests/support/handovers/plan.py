"""What a run of hand-overs is to be, and what the two processes tell each other meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from protocol.messages import Map
from shared.kv.layout import KVLayout

Reading = Literal["as decoded does", "without the event", "without the generation"]
"""How the taker reads; the latter two leave out what makes it right, and must be found out."""

BLOCKS_8B = KVLayout(
    num_blocks=300, num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype="bfloat16"
)
"""2 MiB each, as of the Llama-3.1-8B shape; so few that they are recycled all the time."""

LATE_MS = 3.0
"""How long a kernel spins before each write: long against a message and a pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    layout: KVLayout
    """Of the maker's pool; the taker's has as many blocks."""
    maker_device: int | None
    """Index of the GPU whose pool is handed over; None for a memfd on the CPU."""
    taker_device: int | None
    num_handovers: int
    max_blocks: int = 32
    """Of one hand-over; lengths are drawn from 1 up to it."""
    max_leases: int = 8
    """Hand-overs on their way at once."""
    num_losses: int = 0
    """How often everything that is lent is taken back and overwritten at once, as if the taker were
    proved dead."""
    spin_ms: float = 0.0
    """How long a kernel in front of each write keeps the GPU busy."""
    reading: Reading = "as decoded does"
    seed: int = 0
    timeout_s: float = 120.0
    """For the whole run."""

    def __post_init__(self) -> None:
        """Refuse a pool in which the hand-overs on their way would wait for each other."""
        if self.layout.num_blocks <= self.max_blocks * self.max_leases:
            raise ValueError(
                f"{self.layout.num_blocks} blocks are too few for {self.max_leases} leases of "
                f"{self.max_blocks}"
            )


# --- from the maker to the taker ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PoolTold:
    """How to map the pool; descriptors follow: the pool's on a CPU, the control page's."""

    message: Map
    proof: bytes
    """Digest of the pattern in block 0."""
    num_descriptors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTold:
    """Blocks that are written, or will be once `event` is seen."""

    lease_id: int
    slot: int
    generation: int
    first: int
    blocks: list[int]
    total: int
    event: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffTold:
    """All blocks of a lease, every one of them written."""

    lease_id: int
    slot: int
    generation: int
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class AbortTold:
    """The lease is wanted back."""

    lease_id: int


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Everything that was told before came over a link that is gone."""


@dataclass(frozen=True, slots=True)
class NoMore:
    """Nothing follows."""


# --- from the taker to the maker ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """One lease's ADOPT or RELEASE."""

    kind: Literal["adopt", "release"]
    lease_id: int


# --- from either to whoever started them -------------------------------------------------------

Digests = dict[int, list[int]]
"""By lease, one digest a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one side saw."""

    digests: Digests
    num_voided: int = 0
    """Taker: adopted leases that were taken back under the copy."""
    num_aborted: int = 0
    """Maker: leases that it wanted back half-way."""
