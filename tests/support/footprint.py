"""What a process holds of its machine: what a leak shows in."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One process, at one moment."""

    memory_bytes: int
    """Anonymous memory in use: heaps and stacks, without files and shared memory."""
    num_descriptors: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        """Look at a process of this user."""
        folder = Path(f"/proc/{pid}")
        rollup = (folder / "smaps_rollup").read_text()
        match = re.search(r"^Anonymous: +(\d+) kB$", rollup, re.MULTILINE)
        assert match is not None, rollup
        return cls(
            memory_bytes=int(match[1]) * 1024,
            num_descriptors=len(os.listdir(folder / "fd")),
            num_threads=len(os.listdir(folder / "task")),
        )
