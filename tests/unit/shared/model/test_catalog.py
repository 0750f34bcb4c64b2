"""The catalogue's entries: each must be pinned wholly."""

from __future__ import annotations

import re

import pytest

from shared.model.catalog import CATALOG, CatalogModel


@pytest.mark.parametrize("model", CATALOG.values(), ids=str)
def test_every_entry_is_pinned_by_hash_and_size(model: CatalogModel) -> None:
    """Then it does not matter where the bytes come from."""
    assert re.fullmatch("[0-9a-f]{64}", model.wheel_sha256)
    assert re.fullmatch("[0-9a-f]{64}", model.file_sha256)
    assert model.file_bytes > 0
    assert (
        model.requirement == f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}"
    )


def test_names_are_keys_and_safe_as_folders() -> None:
    """The cache has a folder of each name."""
    for name, model in CATALOG.items():
        assert name == model.name
        assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name)


def test_the_file_is_named_as_in_the_wheel() -> None:
    """The path inside the wheel is no part of it."""
    model = CATALOG["smollm2-135m-instruct"]
    assert model.file_name == "SmolLM2-135M-Instruct.Q4_1.gguf"
