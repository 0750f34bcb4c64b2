"""A model as a daemon brings it up."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.daemon.fingerprint import fingerprint
from shared.daemon.model_host import ModelHost
from shared.kv.errors import LayoutError
from shared.model.errors import ModelError
from tests.unit.shared.daemon.kit import load_host


def test_a_loaded_model_brings_the_layout_of_its_own_cache(host: ModelHost) -> None:
    """Layers, heads and widths are the model's; block size and element type the configuration's."""
    spec, layout = host.spec, host.layout
    assert layout.num_blocks == 16
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim) == (
        spec.num_layers,
        spec.num_kv_heads,
        spec.head_dim,
    )
    assert (layout.block_size, layout.dtype) == (16, "float32")
    assert host.model.spec is spec
    assert host.fingerprint == fingerprint(host.fields)


def test_two_daemons_of_one_configuration_have_one_fingerprint(
    host: ModelHost, model_file: Path
) -> None:
    """Their pools may differ in size: blocks are exchanged, not pools."""
    assert load_host(model_file, num_blocks=99).fingerprint == host.fingerprint


def test_another_block_size_is_another_fingerprint(host: ModelHost, model_file: Path) -> None:
    other = load_host(model_file, {"pool.block_size": 32})
    assert other.layout.block_size == 32
    assert other.fingerprint != host.fingerprint


def test_another_element_type_is_another_fingerprint(host: ModelHost, model_file: Path) -> None:
    other = load_host(model_file, {"model.dtype": "bfloat16"})
    assert other.layout.dtype == "bfloat16"
    assert other.fingerprint != host.fingerprint


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf"):
        load_host(tmp_path / "none.gguf")


def test_a_pool_of_nothing_but_the_reserved_block_is_refused(model_file: Path) -> None:
    with pytest.raises(LayoutError, match="num_blocks"):
        load_host(model_file, num_blocks=1)
