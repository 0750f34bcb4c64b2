"""Answers that do not fit decoded's pool together: some make room for others, nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.crowd import ask_all, ask_all_and_kill_prefilld, crowd, small_pair

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.solo import SoloEngine

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("access", ["pull", "direct"])
def test_every_answer_is_that_of_one_process_alone(
    tmp_path: Path, even_model: Path, solo_engine: SoloEngine, access: str
) -> None:
    """Bit by bit the cache comes back as it was, and chance is drawn from seed and position."""
    with small_pair(tmp_path, even_model, pool__access=access) as pair:
        ask_all(pair, solo_engine, crowd())
        events = [line["event"] for line in pair.log("decoded")]
        assert "sequence.preempted" in events
        assert "sequence.resumed" in events


def test_without_an_arena_clients_ask_for_the_rest_by_themselves(
    tmp_path: Path, even_model: Path, solo_engine: SoloEngine
) -> None:
    """Their streams show nothing of it, and no daemon is suspected of anything."""
    with small_pair(tmp_path, even_model, decoded__swap_gib=0) as pair:
        results = ask_all(pair, solo_engine, crowd())
        losses = [loss for delivered in results for loss in delivered.losses]
        assert losses
        assert all(loss.is_preempted for loss in losses)
        assert pair.counter("decoded", "kvpair_preemptions_total") == len(losses)


def test_prefilld_may_die_while_decoded_reads_its_pool_and_has_no_room(
    tmp_path: Path, even_model: Path, solo_engine: SoloEngine
) -> None:
    """What was read in place goes to the arena."""
    settings = {"pool__access": "direct", "decoded__num_blocks": 48}
    with small_pair(tmp_path, even_model, **settings) as pair:
        ask_all_and_kill_prefilld(pair, solo_engine, crowd(6), after_tokens=110)
        assert pair.counter("decoded", "kvpair_preemptions_total") > 0
