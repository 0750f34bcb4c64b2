"""Brings a GGUF file's tensors into torch, under our names and in our layout.

One tensor at a time, and a tensor in runs of rows, straight into its final memory: beside the
kept weights there is never more than one run's scratch.  Storage types are de-quantised by the
`gguf` package; the query and key projections, which these files keep permuted for the
interleaved rotation, are put back into the half-rotation order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO

import gguf
import numpy as np
import torch

from shared.model.errors import ModelFileError
from shared.model.gguf_file import DAMAGED_HINT, GgufHeader, TensorInfo
from shared.model.gguf_model import UNSUPPORTED_HINT, tensor_names
from shared.model.spec import DType, ModelSpec
from shared.model.tensors import tensor_shapes

if TYPE_CHECKING:
    from numpy.typing import NDArray

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

RUN_ELEMENTS = 1 << 20
"""De-quantised at once: 4 MiB as fp32, some 20 MiB with the package's own scratch."""

# The package splits its work into groups of 16 rows, each with a fixed cost.  Quantisation
# blocks never cross rows, so a run may be seen as 16 long rows, which is several times faster.
PACKAGE_GROUP_ROWS = 16

Progress = Callable[[int, int], None]
"""Called with (bytes of the file done, bytes in all) after every tensor."""


def load_weights(
    header: GgufHeader,
    spec: ModelSpec,
    dtype: DType,
    progress: Progress | None = None,
    *,
    device: torch.device | str = "cpu",
) -> dict[str, torch.Tensor]:
    """Read every weight of a model.

    Args:
        header: The file's header.
        spec: The model's shape, as `read_spec` tells it from the same header.
        dtype: What the weights are kept in; de-quantising itself is always in fp32.
        progress: Hears how far it is.
        device: Where they go; no more than one run of a tensor stays behind on the CPU.

    Returns:
        Contiguous tensors by name: `embed` [vocab_size, hidden_size], `final_norm`
        [hidden_size], `lm_head` as `embed` and absent when tied, and for each layer N
        `layers.N.attn_norm` and `layers.N.mlp_norm` [hidden_size], `layers.N.q|k|v|o` and
        `layers.N.gate|up|down` [out, in].  Rows of q and k are in half-rotation order: element
        i of a head is rotated with element i + head_dim / 2.

    Raises:
        ModelFileError: A tensor is missing, superfluous, misshapen, cut off, or of a type that
            cannot be de-quantised.  All but the last read are checked before any is read.
    """
    jobs = [
        _Job(header, header.tensors[theirs], ours, shape)
        for theirs, ours, shape in _match(header, spec)
    ]
    total_bytes, done_bytes = sum(job.num_bytes for job in jobs), 0
    tensors: dict[str, torch.Tensor] = {}
    with header.path.open("rb") as file:
        # In file order, so that a cold disk reads ahead.
        for job in sorted(jobs, key=lambda job: job.info.offset_bytes):
            tensor = job.read(file, TORCH_DTYPES[dtype], device)
            if job.ours.endswith((".q", ".k")):
                tensor = _half_rotation(tensor, spec.head_dim)
            tensors[job.ours] = tensor
            done_bytes += job.num_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)
    return tensors


def supported_types() -> tuple[str, ...]:
    """Return the names of the storage types that can be de-quantised."""
    return tuple(kind.name for kind in gguf.GGMLQuantizationType if _is_supported(kind))


class _Job:
    """One tensor to be read, checked as far as the header allows."""

    def __init__(
        self, header: GgufHeader, info: TensorInfo, ours: str, shape: tuple[int, ...]
    ) -> None:
        self.path, self.info, self.ours, self.shape = header.path, info, ours, shape
        self.kind = _kind(header, info)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        if shape[-1] % block_elements:
            raise ModelFileError(
                header.path,
                f"stores {info.name!r} as {self.kind.name} in rows of {shape[-1]}, "
                f"not a multiple of {block_elements}",
                hint=DAMAGED_HINT,
            )
        self.row_bytes = shape[-1] // block_elements * block_bytes
        self.num_rows = shape[0] if len(shape) > 1 else 1
        self.num_bytes = self.num_rows * self.row_bytes
        end_bytes = info.offset_bytes + self.num_bytes
        if end_bytes > header.size_bytes:
            raise ModelFileError(
                header.path,
                f"is truncated: {info.name!r} ends at byte {end_bytes} "
                f"of a file of {header.size_bytes}",
                hint=DAMAGED_HINT,
            )

    def read(self, file: BinaryIO, dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=dtype, device=device)
        rows = tensor.view(self.num_rows, self.shape[-1])
        run_rows = max(1, RUN_ELEMENTS // self.shape[-1])
        file.seek(self.info.offset_bytes)
        for start in range(0, self.num_rows, run_rows):
            run = rows[start : start + run_rows]
            raw = np.fromfile(file, dtype=np.uint8, count=len(run) * self.row_bytes)
            if raw.size != len(run) * self.row_bytes:
                raise ModelFileError(
                    self.path, "became shorter while it was read", hint=DAMAGED_HINT
                )
            run.copy_(torch.from_numpy(self._dequantize(raw)).view(run.shape))
        return tensor

    def _dequantize(self, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
        _, block_bytes = gguf.GGML_QUANT_SIZES[self.kind]
        long_rows = PACKAGE_GROUP_ROWS if raw.size // block_bytes % PACKAGE_GROUP_ROWS == 0 else 1
        with np.errstate(over="ignore", invalid="ignore"):  # what is stored may be no number
            values: NDArray[np.float32] = gguf.dequantize(raw.reshape(long_rows, -1), self.kind)
        return values


def _match(header: GgufHeader, spec: ModelSpec) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return (the file's name, ours, shape) of every tensor; raise unless file and spec agree."""
    names, shapes = tensor_names(spec), tensor_shapes(spec)
    missing = sorted(names.keys() - header.tensors.keys())
    if missing:
        raise ModelFileError(
            header.path, f"lacks {len(missing)} tensors, {missing[0]!r} first", hint=DAMAGED_HINT
        )
    unknown = sorted(header.tensors.keys() - names.keys())
    if unknown:
        # Biases, for one: leaving them out would compute another model.
        raise ModelFileError(
            header.path,
            f"has {len(unknown)} tensors that no {spec.architecture} model of ours uses, "
            f"{unknown[0]!r} first",
            hint=UNSUPPORTED_HINT,
        )
    for theirs, ours in names.items():
        if header.tensors[theirs].shape != shapes[ours]:
            raise ModelFileError(
                header.path,
                f"has {theirs!r} of shape {header.tensors[theirs].shape}, not {shapes[ours]}",
                hint=DAMAGED_HINT,
            )
    return [(theirs, ours, shapes[ours]) for theirs, ours in names.items()]


def _kind(header: GgufHeader, info: TensorInfo) -> gguf.GGMLQuantizationType:
    """Return a tensor's storage type; raise unless it can be de-quantised."""
    known = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    kind = known.get(info.type_id)
    if kind is not None and _is_supported(kind):
        return kind
    name = f"number {info.type_id}" if kind is None else kind.name
    raise ModelFileError(
        header.path,
        f"stores {info.name!r} as type {name}; known are: {', '.join(supported_types())}",
        hint=UNSUPPORTED_HINT,
    )


def _half_rotation(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder each head's rows from pairs side by side to pairs half a head apart."""
    out_size, in_size = weight.shape
    pairs = weight.view(out_size // head_dim, head_dim // 2, 2, in_size)
    return pairs.transpose(1, 2).reshape(out_size, in_size)


def _is_supported(kind: gguf.GGMLQuantizationType) -> bool:
    """Tell whether the package de-quantises a type; it has no list, so one block is tried."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), kind)
    except NotImplementedError:
        return False
    return True
