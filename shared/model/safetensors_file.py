"""Reads the header of a safetensors file: which tensors it holds and where each lies.

No tensor data is read and nothing outside the standard library is imported, so the command line
may use it.  The bytes are not trusted: every number is held against the file's size, and the only
exception for a bad file is `ModelFileError`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from shared.model.errors import ModelFileError

LENGTH_BYTES = 8
"""A little-endian u64 before the header says how long it is."""

MAX_HEADER_BYTES = 100_000_000
"""What the format's own reference implementation allows."""

DAMAGED_HINT = "the file is damaged or was not copied to its end; fetch or copy it again"

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The types of weights that can be read, with the bytes of one number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where one tensor lies."""

    path: Path
    name: str
    dtype: str
    """One of `DTYPE_BYTES`."""
    shape: tuple[int, ...]
    offset_bytes: int
    """Of its first byte, from the start of the file."""
    num_bytes: int


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a file, by name.

    Raises:
        ModelFileError: The file is missing, unreadable, truncated, or no safetensors; or a tensor
            is of a type that cannot be read.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - LENGTH_BYTES):
                raise ModelFileError(path, "is no safetensors file", hint=DAMAGED_HINT)
            text = file.read(header_bytes)
    except FileNotFoundError:
        raise ModelFileError(path, "no such file") from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise ModelFileError(path, "has a header that is no JSON object", hint=DAMAGED_HINT)
    data_offset = LENGTH_BYTES + header_bytes
    return {
        name: _tensor(path, name, entry, data_offset, size_bytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _tensor(
    path: Path, name: str, entry: object, data_offset: int, size_bytes: int
) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise ModelFileError(path, f"does not say where {name!r} lies", hint=DAMAGED_HINT)
    if dtype not in DTYPE_BYTES:
        raise ModelFileError(
            path, f"stores {name!r} as {dtype}; known are: {', '.join(DTYPE_BYTES)}"
        )
    begin, end = offsets
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != num_bytes:
        raise ModelFileError(
            path,
            f"has {end - begin} bytes for {name!r}, whose shape {[*shape]} takes {num_bytes}",
            hint=DAMAGED_HINT,
        )
    if data_offset + end > size_bytes:
        raise ModelFileError(
            path,
            f"is truncated: {name!r} ends at byte {data_offset + end} of a file of {size_bytes}",
            hint=DAMAGED_HINT,
        )
    return StoredTensor(
        path=path,
        name=name,
        dtype=dtype,
        shape=shape,
        offset_bytes=data_offset + begin,
        num_bytes=num_bytes,
    )


def _sizes(values: object) -> tuple[int, ...] | None:
    """Return a list of numbers that are no bools and not negative; None for anything else."""
    if not isinstance(values, list):
        return None
    is_good = all(type(value) is int and value >= 0 for value in values)
    return tuple(values) if is_good else None
