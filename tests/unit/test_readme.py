"""The READMEs: a user finds every trouble that can be met, a newcomer every file of a daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from protocol.errors import CODES
from shared.cli.program import COMMANDS
from tests.support.log_events import loud_events

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TROUBLES = README.partition("## Troubleshoot")[2]
TELLS_NOTHING_ELSE = {"up", "chat", "config", "model", "completion", "generate", "probe", "bench"}


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_cause_and_cure(code: str) -> None:
    """A code that is on the wire and not in the chapter helps nobody at three in the morning."""
    assert f"`{code}`" in TROUBLES


@pytest.mark.parametrize("event", sorted({*loud_events(ROOT), "log.dropped", "library.logged"}))
def test_every_event_that_calls_for_attention_has_its_cause_and_cure(event: str) -> None:
    assert f"`{event}`" in TROUBLES


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - TELLS_NOTHING_ELSE))
def test_every_way_to_watch_is_told(command: str) -> None:
    assert f"`kvpair {command}" in README.partition("## Watch")[2].partition("## Upgrade")[0]


@pytest.mark.parametrize("package", ["decoded", "prefilld"])
def test_every_file_of_a_daemon_has_its_place_on_the_map(package: str) -> None:
    """A file that is not told of is found last, and one that is gone is looked for in vain."""
    map_of_files = (ROOT / package / "README.md").read_text().partition("## Where")[2]
    rows = [line for line in map_of_files.partition("\n## ")[0].splitlines() if ".py`" in line]
    named = {name for row in rows for name in re.findall(r"`(\w+\.py)`", row.split("|")[1])}
    assert named == {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
