"""The real pair on GPUs with a pool that is too small: pinned memory holds who makes room."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shared.model.llama import Llama
from shared.model.loader import load_model
from tests.gpu.pair.test_pair_on_gpus import devices
from tests.support.crowd import NUM_BLOCKS, Alone, crowd
from tests.support.pair import Pair, write_tiny_model
from tests.support.watched_streams import WatchedStreams

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def alone(model_file: Path) -> Alone:
    loaded = load_model(str(model_file), "float32")
    return Alone(Llama(loaded.spec, loaded.tensors))


def small_pair(folder: Path, model: Path, *, access: str, num_blocks: int) -> Pair:
    """Return a pair whose decoded has little room; direct access takes one GPU."""
    prefilld, decoded = devices()
    settings: dict[str, object] = {
        "prefilld.device": prefilld,
        "decoded.device": prefilld if access == "direct" else decoded,
        "pool.num_blocks": 400,
        "pool.access": access,
        "decoded.num_blocks": num_blocks,
        "decoded.max_batch": 16,
        "decoded.swap_gib": 0.25,
        "log.level": "info",
    }
    return Pair(folder, model=model, settings=settings, start_timeout_s=200)


@pytest.mark.parametrize("access", ["pull", "direct"])
def test_answers_that_make_room_are_those_of_one_engine(
    tmp_path: Path, model_file: Path, alone: Alone, access: str
) -> None:
    """They leave by the copy engine and come back by it, beside the steps of the others."""
    with small_pair(tmp_path, model_file, access=access, num_blocks=NUM_BLOCKS) as pair:
        with WatchedStreams(pair.socket, crowd(is_greedy=True)) as streams:
            results = streams.results()
        for delivered, ask in zip(results, streams.asks, strict=True):
            alone.check(delivered, ask)
        assert pair.counter("decoded", "kvpair_preemptions_total") > 0
        assert "sequence.resumed" in [line["event"] for line in pair.log("decoded")]
        pair.wait_settled()
        assert pair.decoded_status()["swap"]["used"] == 0


def test_prefilld_may_die_while_decoded_reads_its_memory_and_has_no_room(
    tmp_path: Path, model_file: Path, alone: Alone
) -> None:
    """Its prompts go to pinned memory straight from its pool, and the successor can allocate."""
    asks = crowd(6, is_greedy=True)
    with small_pair(tmp_path, model_file, access="direct", num_blocks=48) as pair:
        with WatchedStreams(pair.socket, asks) as streams:
            streams.wait_for_tokens(len(asks) * 40)
            pair.kill("prefilld")
            pair.restart("prefilld")
            results = streams.results()
        for delivered, ask in zip(results, asks, strict=True):
            alone.check(delivered, ask)
        lost = 'kvpair_requests_failed_total{code="prefill-lost"}'
        assert pair.counter("decoded", lost) == 0
        pair.wait_settled()
