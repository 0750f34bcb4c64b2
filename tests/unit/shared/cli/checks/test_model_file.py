"""The model's files, as `kvpair doctor` sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.cli.checks.finding import Verdict
from shared.cli.checks.model_file import check_model
from shared.config.schema import Config, DecodedConfig, ModelConfig, PoolConfig, PrefilldConfig
from tests.support.tiny_hub import write_hub_model

if TYPE_CHECKING:
    from pathlib import Path


def config_of(model: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(model)),
        pool=PoolConfig(num_blocks=10),
        prefilld=PrefilldConfig(socket="/unused"),
        decoded=DecodedConfig(socket="/unused", num_blocks=20),
    )


def test_a_hugging_face_directory_is_a_model_too(tmp_path: Path) -> None:
    """With its weights and both pools in bytes: 3 layers of 2 heads of 16 numbers, twice."""
    reference = write_hub_model(tmp_path)
    found, sizes = check_model(config_of(tmp_path))
    assert found.verdict is Verdict.OK
    assert str(tmp_path) in found.text
    assert sizes is not None
    num_weights = sum(parameter.numel() for parameter in reference.parameters())
    block_bytes = 16 * 2 * 3 * 2 * 16 * 4
    assert sizes.prefilld_bytes == 4 * num_weights + 10 * block_bytes
    assert sizes.decoded_bytes == 4 * num_weights + 20 * block_bytes


def test_a_directory_that_lacks_a_file_is_named(tmp_path: Path) -> None:
    write_hub_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    found, sizes = check_model(config_of(tmp_path))
    assert found.verdict is Verdict.FAIL
    assert "has neither model.safetensors nor" in found.text
    assert sizes is None
