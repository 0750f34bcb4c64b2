"""Brings the weights of safetensors files into torch, where they will be used.

Files are mapped, not read: a run of rows is converted straight from the mapping into its final
memory, on whatever device, and its pages are given back to the kernel at once.  So beside the kept
weights there is never more than one run, and what two daemons load they read from disk once.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import torch

from shared.model.errors import ModelFileError
from shared.model.safetensors_file import DAMAGED_HINT, StoredTensor
from shared.model.weights import TORCH_DTYPES, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shared.model.hub_files import HubWeights
    from shared.model.spec import DType

STORED_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

RUN_BYTES = 32 << 20
"""Of a file, converted at once: large enough for a GPU's copies, a thousandth of a large model."""


def load_hub_weights(
    weights: HubWeights,
    dtype: DType,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, torch.Tensor]:
    """Load every weight of a model.

    Args:
        weights: Where they are, as `find_hub_weights` checked it.
        dtype: What they are kept in.
        device: Where they go.
        progress: Called with (bytes done, bytes in all) after every run.

    Returns:
        Contiguous tensors by our names, as `shared.model.tensors` lists them.

    Raises:
        ModelFileError: A file became unreadable or shorter since it was checked.
    """
    done_bytes, total_bytes = 0, weights.num_bytes
    tensors: dict[str, torch.Tensor] = {}
    # In file order, so that a cold disk reads ahead.
    by_place = sorted(weights.tensors.items(), key=lambda item: _place(item[1]))
    mapping: _Mapping | None = None
    for ours, stored in by_place:
        if mapping is None or mapping.path != stored.path:
            mapping = _Mapping(stored.path)
        kept = torch.empty(stored.shape, dtype=TORCH_DTYPES[dtype], device=device)
        flat = kept.view(-1)
        for start, run in mapping.runs(stored):
            flat[start : start + len(run)].copy_(run)
            done_bytes += run.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        tensors[ours] = kept
    return tensors


def _place(stored: StoredTensor) -> tuple[str, int]:
    return stored.path.name, stored.offset_bytes


class _Mapping:
    """One file's bytes in memory, page by page as they are touched.

    Unmapped with the last tensor that was made of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Private and writable, since torch warns about memory that nobody may write.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelFileError(path, f"cannot be mapped: {error}") from error

    def runs(self, stored: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield a tensor's numbers run by run: the first one's index, and the run itself.

        A run is good until the next is asked for; then its pages may leave memory.
        """
        if stored.offset_bytes + stored.num_bytes > len(self._map):
            raise ModelFileError(self.path, "became shorter while it was read", hint=DAMAGED_HINT)
        dtype = STORED_DTYPES[stored.dtype]
        num_elements, run_elements = stored.num_bytes // dtype.itemsize, RUN_BYTES // dtype.itemsize
        for start in range(0, num_elements, run_elements):
            count = min(run_elements, num_elements - start)
            offset = stored.offset_bytes + start * dtype.itemsize
            yield start, torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset)
            first_page = offset // mmap.PAGESIZE * mmap.PAGESIZE
            length = offset + count * dtype.itemsize - first_page
            self._map.madvise(mmap.MADV_DONTNEED, first_page, length)
