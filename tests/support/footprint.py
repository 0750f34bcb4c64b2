"""What a running pair takes of its machine: where a leak shows."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.support.gpus import device_index
from tests.support.pair import DAEMONS, DaemonName

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.pair import Pair

KIB = 1 << 10
RESIDENT_KINDS = ("RssAnon", "RssShmem")

NUM_LOOKS = 5
LOOK_PAUSE_S = 0.05


def gpu_free_bytes(device: str) -> int:
    """Return what is free on a GPU, whoever has the rest; 0 for the CPU.

    The first look makes a context there, so the first one tells more than the next.
    """
    index = device_index(device)
    return 0 if index is None else int(torch.cuda.mem_get_info(index)[0])


@dataclass(frozen=True, slots=True)
class ProcessFootprint:
    """One process."""

    num_descriptors: int
    num_threads: int
    resident_bytes: int
    """Without pages of files, which come in whenever code of a library runs for the first time."""

    @classmethod
    def of(cls, pid: int) -> ProcessFootprint:
        """Look at a process of this user.

        Its descriptors are counted a few times, since a connection that was closed at the other end
        just now is not yet closed here; the smallest number counts.
        """
        folder = Path(f"/proc/{pid}/fd")
        counts = []
        for _ in range(NUM_LOOKS):
            counts.append(sum(1 for _ in folder.iterdir()))
            time.sleep(LOOK_PAUSE_S)
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(
            num_descriptors=min(counts),
            num_threads=int(status["Threads"]),
            resident_bytes=sum(int(status[kind].split()[0]) for kind in RESIDENT_KINDS) * KIB,
        )


@dataclass(frozen=True, slots=True)
class Footprint:
    """Both daemons and their GPUs, at one moment."""

    processes: dict[DaemonName, ProcessFootprint]
    gpu_free_bytes: dict[str, int]
    """By device."""

    @classmethod
    def of(cls, pair: Pair, devices: Iterable[str]) -> Footprint:
        """Look at a pair."""
        return cls(
            {name: ProcessFootprint.of(pair.process(name).pid) for name in DAEMONS},
            {device: gpu_free_bytes(device) for device in sorted(set(devices))},
        )

    def gpu_growth_bytes(self, before: Footprint) -> int:
        """Return how much more is taken than before, on the GPU where that is most."""
        return max(
            before.gpu_free_bytes[device] - free_bytes
            for device, free_bytes in self.gpu_free_bytes.items()
        )
