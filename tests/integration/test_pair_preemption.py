"""Answers that do not fit decoded's pool together: some make room for others, nothing is lost."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.support.crowd import NUM_BLOCKS, Alone, crowd
from tests.support.pair import Pair
from tests.support.watched_streams import WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shared.daemon.model_host import ModelHost

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def alone(tiny_host: ModelHost) -> Alone:
    return Alone(tiny_host.model)


@contextmanager
def small_pair(folder: Path, model: Path, **settings: object) -> Iterator[Pair]:
    """Run a pair whose decoded has little room; afterwards every block is back."""
    fixed: dict[str, object] = {"decoded.num_blocks": NUM_BLOCKS, "log.level": "info"}
    changes = {key.replace("__", "."): value for key, value in settings.items()}
    with Pair(folder, model=model, settings=fixed | changes) as pair:
        yield pair
        pair.wait_settled()
        status = pair.decoded_status()
        assert status["sequences"]["swapped"] == status["swap"]["used"] == 0


@pytest.mark.parametrize("access", ["pull", "direct"])
def test_every_answer_is_that_of_one_engine_alone(
    tmp_path: Path, tiny_model: Path, alone: Alone, access: str
) -> None:
    """Bit by bit the cache comes back as it was, and chance is drawn from seed and position."""
    with small_pair(tmp_path, tiny_model, pool__access=access) as pair:
        with WatchedStreams(pair.socket, crowd()) as streams:
            results = streams.results()
        for delivered, ask in zip(results, streams.asks, strict=True):
            assert delivered.ids == alone.answer(ask)
        assert pair.counter("decoded", "kvpair_preemptions_total") > 0
        events = [line["event"] for line in pair.log("decoded")]
        assert "sequence.preempted" in events
        assert "sequence.resumed" in events


def test_without_an_arena_clients_ask_for_the_rest_by_themselves(
    tmp_path: Path, tiny_model: Path, alone: Alone
) -> None:
    """Their streams show nothing of it, and no daemon is suspected of anything."""
    with small_pair(tmp_path, tiny_model, decoded__swap_gib=0) as pair:
        with WatchedStreams(pair.socket, crowd(9)) as streams:
            results = streams.results()
        for delivered, ask in zip(results, streams.asks, strict=True):
            alone.check(delivered, ask)
        losses = [loss for delivered in results for loss in delivered.losses]
        assert losses
        assert all(loss.is_preempted for loss in losses)
        assert pair.counter("decoded", "kvpair_preemptions_total") == len(losses)


def test_prefilld_may_die_while_decoded_reads_its_pool_and_has_no_room(
    tmp_path: Path, tiny_model: Path, alone: Alone
) -> None:
    """What was read in place goes to the arena; nobody who was adopted has to ask again."""
    asks = crowd(6)  # what pool and arena hold together
    with small_pair(tmp_path, tiny_model, pool__access="direct", decoded__num_blocks=48) as pair:
        with WatchedStreams(pair.socket, asks) as streams:
            streams.wait_for_tokens(len(asks) * 110)
            pair.kill("prefilld")
            pair.restart("prefilld")
            results = streams.results()
        for delivered, ask in zip(results, asks, strict=True):
            assert delivered.ids == alone.answer(ask)
        lost = 'kvpair_requests_failed_total{code="prefill-lost"}'
        assert pair.counter("decoded", lost) == 0
        assert [loss for delivered in results for loss in delivered.losses] == []
        assert pair.counter("decoded", "kvpair_preemptions_total") > 0
