"""Weights as they come out of the file: values, order, names, and what is refused."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from shared.model import weights
from shared.model.errors import ModelFileError
from shared.model.gguf_file import GgufHeader, read_header
from shared.model.gguf_model import read_spec
from shared.model.spec import DType
from shared.model.tensors import tensor_shapes
from shared.model.weights import load_weights, supported_types
from tests.support.tiny_gguf import HEAD_DIM, TinyGguf

MATRIX = "blk.0.ffn_down.weight"  # stored and kept in the same order of rows


def load(header: GgufHeader, dtype: DType = "float32") -> dict[str, torch.Tensor]:
    return load_weights(header, read_spec(header), dtype)


def test_all_tensors_come_under_our_names_in_their_shapes(tiny_file: Path) -> None:
    """The forward pass asks for exactly these."""
    header = read_header(tiny_file)
    tensors = load(header)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == tensor_shapes(read_spec(header))
    assert all(tensor.is_contiguous() for tensor in tensors.values())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_values_are_what_the_package_de_quantises(tmp_path: Path, kind: str) -> None:
    """Our runs and long rows only change the order of the work."""
    recipe = TinyGguf(kinds={MATRIX: GGMLQuantizationType[kind]})
    path = recipe.write(tmp_path / "m.gguf")
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == MATRIX)
    expected = gguf.dequantize(stored.data, stored.tensor_type)
    loaded = load(read_header(path))["layers.0.down"]
    np.testing.assert_array_equal(loaded.numpy(), expected)


@pytest.mark.parametrize("kind", supported_types())
def test_every_kind_that_the_package_de_quantises_is_read(tmp_path: Path, kind: str) -> None:
    """On random blocks that are valid: any bytes are a block, but some scales are no numbers."""
    storage = GGMLQuantizationType[kind]
    block_elements, _ = gguf.GGML_QUANT_SIZES[storage]
    blocks = _valid_blocks(storage, num_blocks=256 * 256 // block_elements)
    raw = blocks.reshape(256, -1)
    path = _with_matrix_stored_as(tmp_path, storage, raw)
    expected = gguf.dequantize(raw, storage)
    assert np.isfinite(expected).all()
    loaded = load(read_header(path))["layers.0.down"]
    np.testing.assert_array_equal(loaded.numpy(), expected)


def test_no_kind_of_the_package_is_forgotten() -> None:
    """Those of llama.cpp's usual files, and the exotic ones."""
    usual = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
    usual |= {"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"}
    assert usual <= set(supported_types())


def _valid_blocks(storage: GGMLQuantizationType, *, num_blocks: int) -> NDArray[np.uint8]:
    """Return random blocks of which every number is finite."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[storage]
    random = np.random.default_rng(0)
    found = np.empty((0, block_bytes), dtype=np.uint8)
    while len(found) < num_blocks:
        drawn = random.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            values = gguf.dequantize(drawn, storage).astype(np.float32)
        found = np.concatenate([found, drawn[np.isfinite(values).all(axis=1)]])
    return found[:num_blocks]


def test_runs_shorter_than_a_tensor_join_without_a_seam(
    tiny_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only large models have tensors of more than one run, so the run is made small here."""
    whole = load(read_header(tiny_file))
    monkeypatch.setattr(weights, "RUN_ELEMENTS", 7 * 256)
    in_runs = load(read_header(tiny_file))
    assert all(torch.equal(whole[name], in_runs[name]) for name in whole)


@pytest.mark.parametrize(("ours", "heads"), [("q", 4), ("k", 2)])
def test_query_and_key_rows_leave_the_interleaved_order(
    tmp_path: Path, ours: str, heads: int
) -> None:
    """The file pairs rows 2i and 2i+1 of a head; the forward pass pairs rows i and i+32."""
    recipe = TinyGguf()
    numbers = np.arange(heads * HEAD_DIM, dtype=np.float32)
    recipe.tensors[f"blk.0.attn_{ours}.weight"] = np.repeat(numbers[:, None], 256, axis=1)
    rows = load(read_header(recipe.write(tmp_path / "m.gguf")))[f"layers.0.{ours}"][:, 0].numpy()
    for head in range(heads):
        start = head * HEAD_DIM
        pairs = np.arange(start, start + HEAD_DIM).reshape(HEAD_DIM // 2, 2)
        np.testing.assert_array_equal(rows[start : start + HEAD_DIM], pairs.T.reshape(-1))


def test_bfloat16_is_the_rounded_float32(tiny_file: Path) -> None:
    """De-quantising is in fp32 whatever is kept."""
    header = read_header(tiny_file)
    exact, kept = load(header), load(header, "bfloat16")
    assert all(torch.equal(kept[name], exact[name].to(torch.bfloat16)) for name in exact)


def test_progress_counts_bytes_up_to_all_of_them(tiny_file: Path) -> None:
    """A bar that ends short of its end looks like a hang."""
    header = read_header(tiny_file)
    heard: list[tuple[int, int]] = []
    load_weights(header, read_spec(header), "float32", lambda *counts: heard.append(counts))
    assert len(heard) == len(header.tensors)
    assert heard == sorted(heard)
    assert heard[-1][0] == heard[-1][1]


def test_supported_types_are_those_that_the_package_has_code_for() -> None:
    """The list is in an error message, so it must be neither longer nor shorter than the truth."""
    names = supported_types()
    assert {"F32", "F16", "BF16", "Q4_1", "Q8_0", "Q6_K", "IQ4_NL"} <= set(names)
    assert {"I8", "I32", "F64", "Q8_K"}.isdisjoint(names)


def test_a_truncated_file_is_refused_before_anything_is_read(tiny_file: Path) -> None:
    """The header is whole, so only the table of tensors can tell."""
    size_bytes = tiny_file.stat().st_size
    with tiny_file.open("r+b") as file:
        file.truncate(size_bytes - 4096)
    with pytest.raises(ModelFileError, match=r"is truncated: '.*' ends at byte \d+ of a file of"):
        load(read_header(tiny_file))


def test_a_file_that_shrinks_while_it_is_read_is_a_named_error(tiny_file: Path) -> None:
    """Somebody may copy over the file at that moment."""
    header = read_header(tiny_file)
    with tiny_file.open("r+b") as file:
        file.truncate(header.data_offset_bytes + 10)
    with pytest.raises(ModelFileError, match="became shorter while it was read"):
        load(header)


def test_an_unknown_storage_type_is_refused_with_the_list(tmp_path: Path) -> None:
    """New types appear every few months."""
    recipe = TinyGguf()
    path = recipe.write(tmp_path / "m.gguf")
    _patch_type(path, MATRIX, 250)
    with pytest.raises(
        ModelFileError, match=f"stores '{MATRIX}' as type number 250; known are: F32"
    ):
        load(read_header(path))


def test_a_storage_type_without_code_is_refused_by_name(tmp_path: Path) -> None:
    """The package knows the sizes of more types than it can de-quantise."""
    path = TinyGguf().write(tmp_path / "m.gguf")
    _patch_type(path, MATRIX, GGMLQuantizationType.I32)
    with pytest.raises(ModelFileError, match=f"stores '{MATRIX}' as type I32; known are: F32"):
        load(read_header(path))


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    """A norm of 255 numbers cannot be in blocks of 32; only a damaged header says so."""
    recipe = TinyGguf()
    recipe.metadata["llama.feed_forward_length"] = (255, gguf.GGUFValueType.UINT32)
    for name in ("ffn_gate", "ffn_up"):
        recipe.tensors[f"blk.0.{name}.weight"] = np.zeros((255, 256), dtype=np.float32)
    recipe.tensors[MATRIX] = np.zeros((256, 255), dtype=np.float32)
    path = recipe.write(tmp_path / "m.gguf")
    _patch_type(path, MATRIX, GGMLQuantizationType.Q4_1)
    with pytest.raises(ModelFileError, match="as Q4_1 in rows of 255, not a multiple of 32"):
        load(read_header(path))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    """Without it there is no model."""
    recipe = TinyGguf()
    del recipe.tensors[MATRIX]
    with pytest.raises(ModelFileError, match=f"lacks 1 tensors, '{MATRIX}' first"):
        load(read_header(recipe.write(tmp_path / "m.gguf")))


def test_a_tensor_of_unknown_purpose_is_refused(tmp_path: Path) -> None:
    """Leaving out a bias would compute another model without a word."""
    recipe = TinyGguf(tensors={"blk.0.attn_q.bias": np.zeros(256, dtype=np.float32)})
    with pytest.raises(ModelFileError, match=r"has 1 tensors that no llama .*'blk.0.attn_q.bias'"):
        load(read_header(recipe.write(tmp_path / "m.gguf")))


def test_a_tensor_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    """The header contradicts itself."""
    recipe = TinyGguf(tensors={"output_norm.weight": np.zeros(255, dtype=np.float32)})
    with pytest.raises(
        ModelFileError, match=r"'output_norm.weight' of shape \(255,\), not \(256,\)"
    ):
        load(read_header(recipe.write(tmp_path / "m.gguf")))


def _patch_type(path: Path, name: str, type_id: int) -> None:
    """Overwrite one tensor's storage type in the file."""
    data = bytearray(path.read_bytes())
    entry = data.index(name.encode()) + len(name)
    num_dimensions = int.from_bytes(data[entry : entry + 4], "little")
    at = entry + 4 + 8 * num_dimensions
    data[at : at + 4] = int(type_id).to_bytes(4, "little")
    path.write_bytes(data)


def _with_matrix_stored_as(
    folder: Path,
    storage: GGMLQuantizationType,
    raw: np.ndarray[tuple[int, int], np.dtype[np.uint8]],
) -> Path:
    """Write the tiny model with `raw` as the bytes of one matrix: shorter than the fp32 it has."""
    path = TinyGguf().write(folder / "raw.gguf")
    info = read_header(path).tensors[MATRIX]
    _patch_type(path, MATRIX, storage)
    with path.open("r+b") as file:
        file.seek(info.offset_bytes)
        file.write(raw.tobytes())
    return path
