"""The real pair on GPUs with a pool that is too small: pinned memory holds who makes room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.crowd import ask_all, ask_all_and_kill_prefilld, crowd, small_pair
from tests.support.gpus import pair_devices

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from tests.support.pair import Pair
    from tests.support.solo import SoloEngine

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def tight_pair(
    folder: Path, model: Path, *, access: str, **settings: object
) -> AbstractContextManager[Pair]:
    """Return a pair with little room; direct access takes one GPU."""
    prefilld, decoded = pair_devices()
    return small_pair(
        folder,
        model,
        devices=(prefilld, prefilld if access == "direct" else decoded),
        start_timeout_s=200,
        pool__access=access,
        decoded__swap_gib=0.25,
        **settings,
    )


@pytest.mark.parametrize("access", ["pull", "direct"])
def test_answers_that_make_room_are_those_of_one_process(
    tmp_path: Path, model: Path, engine: SoloEngine, access: str
) -> None:
    """They leave by the copy engine and come back by it, beside the steps of the others."""
    with tight_pair(tmp_path, model, access=access) as pair:
        ask_all(pair, engine, crowd())
        assert "sequence.resumed" in [line["event"] for line in pair.log("decoded")]


def test_prefilld_may_die_while_decoded_reads_its_memory_and_has_no_room(
    tmp_path: Path, model: Path, engine: SoloEngine
) -> None:
    """Its prompts go to pinned memory straight from its pool, and the successor can allocate."""
    with tight_pair(tmp_path, model, access="direct", decoded__num_blocks=48) as pair:
        ask_all_and_kill_prefilld(pair, engine, crowd(6), after_tokens=40)
