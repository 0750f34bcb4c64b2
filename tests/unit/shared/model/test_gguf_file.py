"""The header reader, held against the `gguf` package and against damaged files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import pytest
from gguf import GGUFValueType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model.errors import ModelFileError
from shared.model.gguf_file import SAMPLE_BYTES, content_id, read_header
from tests.support.tiny_gguf import TinyGguf

IN_ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def _contents(reader: gguf.GGUFReader) -> dict[str, object]:
    own = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")
    values = {key: field.contents() for key, field in reader.fields.items() if key not in own}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}


def test_metadata_is_what_the_package_reads(tiny_file: Path) -> None:
    """The package is the format's reference in Python."""
    assert read_header(tiny_file).metadata == _contents(gguf.GGUFReader(tiny_file))


@pytest.mark.model
@pytest.mark.slow
def test_a_real_file_s_metadata_is_what_the_package_reads(smollm2_file: Path) -> None:
    """A hundred thousand strings, which take the package seconds."""
    assert read_header(smollm2_file).metadata == _contents(gguf.GGUFReader(smollm2_file))


def test_every_kind_of_value_is_read(tmp_path: Path) -> None:
    """Files hold all twelve kinds, alone and in arrays."""
    recipe = TinyGguf()
    recipe.metadata |= {
        "x.u8": (200, GGUFValueType.UINT8),
        "x.i8": (-100, GGUFValueType.INT8),
        "x.u16": (60_000, GGUFValueType.UINT16),
        "x.i16": (-30_000, GGUFValueType.INT16),
        "x.i32": (-(1 << 31), GGUFValueType.INT32),
        "x.bool": (True, GGUFValueType.BOOL),
        "x.u64": ((1 << 64) - 1, GGUFValueType.UINT64),
        "x.i64": (-(1 << 63), GGUFValueType.INT64),
        "x.f64": (0.1, GGUFValueType.FLOAT64),
        "x.floats": ([0.5, 0.25], GGUFValueType.ARRAY),
        "x.bools": ([True, False], GGUFValueType.ARRAY),
    }
    path = recipe.write(tmp_path / "kinds.gguf")
    assert read_header(path).metadata == _contents(gguf.GGUFReader(path))


def test_tensors_lie_where_the_package_finds_them(tiny_file: Path) -> None:
    """Shapes are row-major here and column-major in the file."""
    expected = {
        tensor.name: (
            tuple(reversed(tensor.shape.tolist())),
            tensor.tensor_type,
            tensor.data_offset,
        )
        for tensor in gguf.GGUFReader(tiny_file).tensors
    }
    found = {
        name: (info.shape, info.type_id, info.offset_bytes)
        for name, info in read_header(tiny_file).tensors.items()
    }
    assert found == expected


def test_an_alignment_of_its_own_is_obeyed(tmp_path: Path) -> None:
    """The data begins at a multiple of what the file says, not of the usual 32."""
    recipe = TinyGguf(metadata={"general.alignment": (4096, GGUFValueType.UINT32)})
    path = recipe.write(tmp_path / "aligned.gguf")
    assert read_header(path).data_offset_bytes % 4096 == 0


@pytest.mark.parametrize("alignment", [0, 3, 48])
def test_an_alignment_that_is_no_power_of_two_is_refused(tmp_path: Path, alignment: int) -> None:
    """Zero would divide by zero; the others contradict the format."""
    path = _file(tmp_path, _value(b"general.alignment", 4, struct.pack("<I", alignment)))
    with pytest.raises(ModelFileError, match=f"has the alignment {alignment}"):
        read_header(path)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "is not a GGUF file"),
        (b"GGU", "is not a GGUF file"),
        (b"PK\x03\x04 and so on", "is not a GGUF file"),
        (b"GGUF", "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "is GGUF version 1; read are"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian GGUF; read are"),
        (b"GGUF broken file", "is GGUF version 1869767200; read are"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40), "ends inside its header"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "ends inside its header"),
    ],
)
def test_what_is_no_such_file_is_said_to_be_none(tmp_path: Path, data: bytes, fault: str) -> None:
    """A user who named the wrong file must see that at once."""
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=fault):
        read_header(path)


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (struct.pack("<Q", 1 << 17), "has a name of 131072 bytes; 65536 is the longest"),
        (struct.pack("<Q", 2) + b"\xff\xff", "that is not UTF-8"),
    ],
)
def test_a_bad_name_is_refused(tmp_path: Path, body: bytes, fault: str) -> None:
    """A name's length is checked before its bytes are asked for."""
    with pytest.raises(ModelFileError, match=fault):
        read_header(_file(tmp_path, body + bytes(1 << 18)))


@pytest.mark.parametrize(
    ("kind", "payload", "fault"),
    [
        (13, b"", "a metadata value of unknown type 13"),
        (9, struct.pack("<IQ", 9, 1), "a metadata value of unknown type 9"),
        (9, struct.pack("<IQ", 8, 1 << 60), "ends inside its header"),
        (9, struct.pack("<IQ", 12, 1 << 60), "ends inside its header"),
        (8, struct.pack("<Q", 1 << 62), "ends inside its header"),
    ],
)
def test_a_value_larger_than_the_file_is_refused_before_it_is_allocated(
    tmp_path: Path, kind: int, payload: bytes, fault: str
) -> None:
    """A length of an exabyte costs a comparison, not an exabyte; nested arrays are no Llama's."""
    with pytest.raises(ModelFileError, match=fault):
        read_header(_file(tmp_path, _value(b"k", kind, payload)))


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    """Which of both counts would be a guess."""
    value = _value(b"k", 4, struct.pack("<I", 1))
    with pytest.raises(ModelFileError, match="has the metadata key 'k' twice"):
        read_header(_file(tmp_path, value, value))


def test_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    """As for keys."""
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<IQIQ", 1, 4, 0, 0)
    path = tmp_path / "twice.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + info + info + bytes(64))
    with pytest.raises(ModelFileError, match="has the tensor 't' twice"):
        read_header(path)


def test_a_tensor_that_begins_behind_the_end_is_refused(tiny_file: Path) -> None:
    """Half a model describes itself as well as a whole one."""
    with tiny_file.open("r+b") as file:
        file.truncate(read_header(tiny_file).data_offset_bytes + 4096)
    with pytest.raises(ModelFileError, match=r"is truncated: '.*' begins at byte \d+ of a file of"):
        read_header(tiny_file)


def test_a_tensor_of_too_many_dimensions_is_refused(tmp_path: Path) -> None:
    """The count comes from the file and says how much is read next."""
    path = tmp_path / "deep.gguf"
    info = struct.pack("<Q", 1) + b"t" + struct.pack("<I", 1 << 31)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info)
    with pytest.raises(ModelFileError, match="has the tensor 't' of 2147483648 dimensions"):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """The path is what the user has to mend."""
    with pytest.raises(ModelFileError, match=r"gone\.gguf: no such file; give a GGUF file"):
        read_header(tmp_path / "gone.gguf")


def test_a_folder_is_named(tmp_path: Path) -> None:
    """Hugging Face models are folders, so this will be tried."""
    with pytest.raises(ModelFileError, match="is a folder, not a GGUF file"):
        read_header(tmp_path)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A loop of links fails for every user, root included."""
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)
    with pytest.raises(ModelFileError, match="cannot be read: Too many levels of symbolic links"):
        read_header(path)


@IN_ONE_FOLDER
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_header_cut_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    """Half a download must never pass for a model."""
    whole = tmp_path / "whole.gguf"
    if not whole.exists():
        TinyGguf().write(whole)
    header_bytes = read_header(whole).data_offset_bytes
    part = tmp_path / "part.gguf"
    part.write_bytes(whole.read_bytes()[: int(header_bytes * share)])
    with pytest.raises(ModelFileError, match=r"part\.gguf: (ends inside|is not|is truncated)"):
        read_header(part)


def test_the_content_id_tells_trainings_of_one_shape_apart(tmp_path: Path, tiny_file: Path) -> None:
    """Two daemons must not share a cache between two models that only differ in weights."""
    other = TinyGguf()
    other.tensors["blk.0.attn_v.weight"] += 1
    first, second = read_header(tiny_file), read_header(other.write(tmp_path / "other.gguf"))
    assert first.tensors == second.tensors
    assert content_id(first) != content_id(second)
    assert content_id(first) == content_id(read_header(tiny_file))


def test_the_content_id_reads_a_page_of_each_tensor(tmp_path: Path, tiny_file: Path) -> None:
    """What it covers is promised, and so is that it does not grow with the model."""
    before = content_id(read_header(tiny_file))
    header = read_header(tiny_file)
    largest = header.tensors["token_embd.weight"]
    with tiny_file.open("r+b") as file:
        os.pwrite(file.fileno(), b"\x01", largest.offset_bytes + SAMPLE_BYTES)
    assert content_id(read_header(tiny_file)) == before
    with tiny_file.open("r+b") as file:
        os.pwrite(file.fileno(), b"\x01\x02", largest.offset_bytes + SAMPLE_BYTES - 1)
    assert content_id(read_header(tiny_file)) != before


def test_the_content_id_of_a_vanished_file_is_a_named_error(tiny_file: Path) -> None:
    """It is read again after the weights, which take seconds."""
    header = read_header(tiny_file)
    tiny_file.unlink()
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        content_id(header)


def _value(key: bytes, kind: int, payload: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def _file(folder: Path, *values: bytes) -> Path:
    path = folder / "made.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values))
    return path
