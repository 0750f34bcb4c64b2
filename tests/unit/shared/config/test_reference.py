"""`shared.config.reference`: the README's table is the schema's."""

from __future__ import annotations

from pathlib import Path

import shared
from shared.config.reference import configuration_table
from shared.config.sources import KEYS


def test_the_readme_shows_the_present_table() -> None:
    """Put `python -m shared.config.reference` into shared/README.md when this fails."""
    readme = Path(shared.__file__).with_name("README.md").read_text()
    assert configuration_table() in readme


def test_every_key_says_what_it_means() -> None:
    rows = [line.split(" | ") for line in configuration_table().splitlines()[2:]]
    assert [row[0] for row in rows] == [f"| `{key}`" for key in KEYS]
    assert all(len(row[3]) > 10 for row in rows)
