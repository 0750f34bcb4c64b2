"""Reads the header of a GGUF file: its metadata and where each tensor lies.

No tensor data is read and nothing outside the standard library is imported, so this takes tens of
milliseconds where the `gguf` package's reader takes seconds: that one makes several arrays for
each of the hundred thousand strings of a tokenizer, and takes a truncated file for a short one.
Tensors are known to begin inside the file; whether they end there depends on their storage types,
which are `weights`' matter.

The bytes are not trusted: every length is held against what is left of the file before anything
is allocated, and the only exception for a bad file is `ModelFileError`.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from shared.model.errors import ModelFileError

Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # 3 added big-endian files, which we refuse; the layout is the same
DEFAULT_ALIGNMENT_BYTES = 32
MAX_DIMENSIONS = 4  # what the format's own reference implementation allows
MAX_NAME_BYTES = 1 << 16  # the specification's bound on a key; tensor names are far shorter
SAMPLE_BYTES = 4096
"""How much of each tensor goes into a content id: one page, so a warm start stays in milliseconds
whatever the model's size."""

STRING, ARRAY = 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
U32, U64 = SCALARS[4], SCALARS[10]
NOT_GGUF_HINT = (
    "give a GGUF file, a Hugging Face directory, or a model that `kvpair model list` names"
)
DAMAGED_HINT = "the file is damaged or was not copied to its end; fetch or copy it again"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where one tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as numpy and torch have it: the last dimension is contiguous."""
    type_id: int
    """Storage type, numbered as `gguf.GGMLQuantizationType` does."""
    offset_bytes: int
    """Of its first byte, from the start of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A GGUF file's metadata and table of tensors."""

    path: Path
    size_bytes: int
    data_offset_bytes: int
    """Where tensor data begins; all before it is header."""
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Read the header of the GGUF file at `path`.

    Raises:
        ModelFileError: The file is missing, unreadable, truncated, or not GGUF of a known version.
    """
    try:
        with path.open("rb") as file:
            return _parse(_Reader(path, file, os.fstat(file.fileno()).st_size))
    except FileNotFoundError:
        raise ModelFileError(path, "no such file", hint=NOT_GGUF_HINT) from None
    except IsADirectoryError:
        raise ModelFileError(path, "is a folder, not a GGUF file", hint=NOT_GGUF_HINT) from None
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error


def content_id(header: GgufHeader) -> str:
    """Return 32 hex digits that differ between models, at a price that does not grow with them.

    Covers the whole header (so every shape, the vocabulary and the chat template), the file's
    size, and the first `SAMPLE_BYTES` of every tensor.  It tells apart two models and two
    trainings of one model; it is no proof against a forged file.

    Raises:
        ModelFileError: The file changed or vanished since its header was read.
    """
    digest = hashlib.sha256(header.size_bytes.to_bytes(8, "little"))
    try:
        with header.path.open("rb") as file:
            digest.update(file.read(header.data_offset_bytes))
            for tensor in sorted(header.tensors.values(), key=lambda info: info.offset_bytes):
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, tensor.offset_bytes))
    except OSError as error:
        raise ModelFileError(header.path, f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


class _Reader:
    """Takes typed values off a file, never past its end."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self.path, self.size_bytes = path, size_bytes
        self.position_bytes = 0
        self._file = file

    def fail(self, fault: str, hint: str = DAMAGED_HINT) -> ModelFileError:
        return ModelFileError(self.path, fault, hint=hint)

    def require(self, num_bytes: int) -> None:
        left_bytes = self.size_bytes - self.position_bytes
        if num_bytes > left_bytes:
            raise self.fail(
                f"ends inside its header: byte {self.position_bytes} announces {num_bytes} more "
                f"and {left_bytes} are left"
            )

    def take(self, num_bytes: int) -> bytes:
        self.require(num_bytes)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.fail("became shorter while it was read")
        self.position_bytes += num_bytes
        return data

    def unsigned(self, kind: struct.Struct) -> int:
        value: int = kind.unpack(self.take(kind.size))[0]
        return value

    def string(self, max_bytes: int | None = None) -> str:
        num_bytes = self.unsigned(U64)
        if max_bytes is not None and num_bytes > max_bytes:
            raise self.fail(f"has a name of {num_bytes} bytes; {max_bytes} is the longest allowed")
        try:
            return self.take(num_bytes).decode()
        except UnicodeDecodeError:
            raise self.fail(f"has text at byte {self.position_bytes} that is not UTF-8") from None

    def value(self) -> Value:
        kind = self.unsigned(U32)
        if kind != ARRAY:
            return self._values(kind, 1)[0]
        kind = self.unsigned(U32)
        return self._values(kind, self.unsigned(U64))

    def _values(self, kind: int, count: int) -> tuple[Scalar, ...]:
        if kind == STRING:
            self.require(count * U64.size)  # each string costs at least its length
            return tuple([self.string() for _ in range(count)])
        if kind not in SCALARS:
            raise self.fail(f"has a metadata value of unknown type {kind}")
        scalar = SCALARS[kind]
        data = self.take(count * scalar.size)
        return tuple([value for (value,) in scalar.iter_unpack(data)])


def _parse(reader: _Reader) -> GgufHeader:
    if reader.size_bytes < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
        raise reader.fail("is not a GGUF file", NOT_GGUF_HINT)
    version = reader.unsigned(U32)
    if version not in VERSIONS:
        is_swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        kind = "is big-endian GGUF" if is_swapped else f"is GGUF version {version}"
        known = " and ".join(map(str, VERSIONS))
        raise reader.fail(f"{kind}; read are little-endian versions {known}", NOT_GGUF_HINT)
    num_tensors, num_values = reader.unsigned(U64), reader.unsigned(U64)
    metadata: dict[str, Value] = {}
    for _ in range(num_values):
        key = reader.string(MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fail(f"has the metadata key {key!r} twice")
        metadata[key] = reader.value()
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    alignment_bytes = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if (
        not isinstance(alignment_bytes, int)
        or alignment_bytes < 1
        or alignment_bytes & (alignment_bytes - 1)
    ):
        raise reader.fail(f"has the alignment {alignment_bytes!r}, which is not a power of two")
    data_offset_bytes = -(-reader.position_bytes // alignment_bytes) * alignment_bytes
    tensors: dict[str, TensorInfo] = {}
    for name, shape, type_id, offset_bytes in infos:
        if name in tensors:
            raise reader.fail(f"has the tensor {name!r} twice")
        if data_offset_bytes + offset_bytes >= reader.size_bytes:
            raise reader.fail(
                f"is truncated: {name!r} begins at byte {data_offset_bytes + offset_bytes} "
                f"of a file of {reader.size_bytes}"
            )
        tensors[name] = TensorInfo(
            name=name,
            shape=shape,
            type_id=type_id,
            offset_bytes=data_offset_bytes + offset_bytes,
        )
    return GgufHeader(
        path=reader.path,
        size_bytes=reader.size_bytes,
        data_offset_bytes=data_offset_bytes,
        metadata=metadata,
        tensors=tensors,
    )


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Return name, row-major shape, storage type, and offset from the start of the data."""
    name = reader.string(MAX_NAME_BYTES)
    num_dimensions = reader.unsigned(U32)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise reader.fail(f"has the tensor {name!r} of {num_dimensions} dimensions")
    shape = tuple(reader.unsigned(U64) for _ in range(num_dimensions))[::-1]
    return name, shape, reader.unsigned(U32), reader.unsigned(U64)
