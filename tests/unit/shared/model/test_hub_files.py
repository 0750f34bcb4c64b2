"""Where the weights of a directory are, and what is wrong with them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model import hub_weights
from shared.model.errors import ModelFileError
from shared.model.hub_config import read_hub_spec
from shared.model.hub_files import INDEX, find_hub_weights, hub_content_id
from shared.model.hub_weights import load_hub_weights
from shared.model.tensors import tensor_shapes
from tests.support.tiny_hub import write_hub_model

if TYPE_CHECKING:
    from pathlib import Path

    from shared.model.hub_files import HubWeights

NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    write_hub_model(path, "llama")
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded")
    write_hub_model(path, "llama", max_shard_size="100KB")
    return path


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded model, to be damaged."""
    return shutil.copytree(sharded, tmp_path / "model")


def find(folder: Path) -> HubWeights:
    return find_hub_weights(folder, read_hub_spec(folder))


def rewrite_index(folder: Path, **weight_map: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weight_map
    (folder / INDEX).write_text(json.dumps(index))


def rewrite(folder: Path, **changes: Any) -> None:  # noqa: ANN401 - tensors, or None to leave out
    """Write the whole model's file again with other tensors."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def test_every_weight_has_its_place(sharded: Path) -> None:
    """Under our names, in the shape that the configuration asks for."""
    weights = find(sharded)
    shapes = {name: stored.shape for name, stored in weights.tensors.items()}
    assert shapes == tensor_shapes(read_hub_spec(sharded))
    assert weights.num_bytes == 4 * read_hub_spec(sharded).num_parameters


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelFileError, match=f"lacks the shard '{shard.name}' that {INDEX} names"):
        find(folder)


def test_an_index_cannot_lead_out_of_its_folder(folder: Path) -> None:
    rewrite_index(folder, **{NORM: "../other/model.safetensors"})
    with pytest.raises(ModelFileError, match="which is no file of this folder"):
        find(folder)


def test_an_index_that_names_the_wrong_shard_is_refused(folder: Path) -> None:
    shards = sorted(path.name for path in folder.glob("model-*.safetensors"))
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    wrong = next(shard for shard in shards if shard != index[NORM])
    rewrite_index(folder, **{NORM: wrong})
    with pytest.raises(ModelFileError, match=f"{wrong}: lacks '{NORM}', which {INDEX} says"):
        find(folder)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path, whole: Path) -> None:
    shutil.copy(whole / "config.json", tmp_path)
    with pytest.raises(ModelFileError, match=r"has neither model\.safetensors nor"):
        find(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelFileError, match="pickled weights are not read; save them as"):
        find(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path, whole: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "m")
    rewrite(folder, **{NORM: None})
    with pytest.raises(ModelFileError, match=f"lacks 1 tensors, '{NORM}' first"):
        find(folder)


def test_a_tensor_of_unknown_purpose_is_refused(tmp_path: Path, whole: Path) -> None:
    """Leaving a bias out would compute another model; computed tables are no weights."""
    import torch

    folder = shutil.copytree(whole, tmp_path / "m")
    name = "model.layers.0.self_attn.q_proj.bias"
    rewrite(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    find(folder)
    rewrite(folder, **{name: torch.zeros(64)})
    with pytest.raises(ModelFileError, match=f"that no llama model of ours uses, '{name}' first"):
        find(folder)


def test_a_tied_head_that_is_stored_all_the_same_is_left_alone(tmp_path: Path) -> None:
    import torch

    write_hub_model(tmp_path, "llama-tied")
    rewrite(tmp_path, **{"lm_head.weight": torch.zeros(384, 64)})
    assert "lm_head" not in find(tmp_path).tensors


def test_a_wrong_shape_is_named_with_both(tmp_path: Path, whole: Path) -> None:
    import torch

    folder = shutil.copytree(whole, tmp_path / "m")
    rewrite(folder, **{NORM: torch.zeros(63)})
    says = rf"has '{NORM}' of shape \[63\], where config.json asks for \[64\]"
    with pytest.raises(ModelFileError, match=says):
        find(folder)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bool"])
def test_another_type_is_named_with_the_list(tmp_path: Path, whole: Path, dtype: str) -> None:
    import torch

    folder = shutil.copytree(whole, tmp_path / "m")
    rewrite(folder, **{NORM: torch.zeros(64).to(getattr(torch, dtype))})
    says = f"stores '{NORM}' as .*; known are: F64, F32, F16, BF16"
    with pytest.raises(ModelFileError, match=says):
        find(folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(damage=st.binary(min_size=1, max_size=40), at=st.integers(0, 6000))
def test_a_damaged_header_is_a_named_error_or_does_no_harm(
    tmp_path: Path, whole: Path, damage: bytes, at: int
) -> None:
    """Whatever the bytes, nothing but `ModelFileError` comes out, in one line."""
    folder = tmp_path / "damaged"
    if not folder.exists():
        shutil.copytree(whole, folder)
    path = folder / "model.safetensors"
    data = bytearray((whole / "model.safetensors").read_bytes())
    data[at : at + len(damage)] = damage
    path.write_bytes(data)
    try:
        find(folder)
    except ModelFileError as error:
        told = str(error)
    else:
        told = ""
    assert "\n" not in told


def test_a_truncated_file_is_found_before_anything_is_read(tmp_path: Path, whole: Path) -> None:
    folder = shutil.copytree(whole, tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match=r"is truncated: .* ends at byte"):
        find(folder)


def test_a_file_that_shrinks_before_it_is_loaded_is_named(tmp_path: Path, whole: Path) -> None:
    """Touching what is not there any more would kill the daemon."""
    folder = shutil.copytree(whole, tmp_path / "m")
    weights = find(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ModelFileError, match="became shorter while it was read"):
        load_hub_weights(weights, "float32")


def test_runs_join_without_a_seam_and_are_told_of(
    sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only large tensors have more than one run, so the run is made small here."""
    whole = load_hub_weights(find(sharded), "float32")
    monkeypatch.setattr(hub_weights, "RUN_BYTES", 1000)
    heard: list[tuple[int, int]] = []
    weights = find(sharded)
    in_runs = load_hub_weights(
        weights, "float32", progress=lambda done, total: heard.append((done, total))
    )
    assert all(bool((whole[name] == in_runs[name]).all()) for name in whole)
    assert heard == sorted(heard)
    assert heard[-1] == (weights.num_bytes, weights.num_bytes)
    assert len(heard) > len(whole)


def test_identity_follows_weights_and_files(tmp_path: Path, whole: Path) -> None:
    """Another training, template or tokenizer is another model; another folder is not."""
    import torch

    folder = shutil.copytree(whole, tmp_path / "m")
    assert hub_content_id(find(folder)) == hub_content_id(find(whole))
    (folder / "chat_template.jinja").write_text("other")
    other_template = hub_content_id(find(folder))
    rewrite(folder, **{NORM: torch.zeros(64)})
    ids = {hub_content_id(find(whole)), other_template, hub_content_id(find(folder))}
    assert len(ids) == 3
