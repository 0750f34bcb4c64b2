"""A real decoded on a GPU, and a prefilld that is played by the test and says what is not so.

Each lie ends in a refusal that names it, and the same decoded then serves over a healthy link.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol import messages as wire
from shared.daemon.devices import Device, resolve_device
from shared.daemon.model_host import ModelHost
from shared.engine.local import LocalEngine
from tests.support.gpus import pair_devices
from tests.support.link_peers import NUM_BLOCKS, FakePrefilld, load_host
from tests.support.pair import Pair, wait_until, write_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

PROMPT = [2 + (7 * index) % 250 for index in range(37)]
MAX_TOKENS = 20
NOBODYS_GPU = "GPU-00000000-0000-0000-0000-000000000000"
GARBAGE = bytes(range(64))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Pair]:
    prefilld, decoded = pair_devices()
    settings = {"prefilld.device": prefilld, "decoded.device": decoded, "pool.access": "pull"}
    pair = Pair(tmp_path_factory.mktemp("b"), model=model_file, settings=settings)
    with pair.alone("decoded") as alone:
        yield alone


@pytest.fixture(scope="module")
def device() -> Device:
    return resolve_device(pair_devices()[0])


@pytest.fixture(scope="module")
def host(model_file: Path, device: Device) -> ModelHost:
    return load_host(model_file, device)


@pytest.fixture
def peer(daemon: Pair, host: ModelHost, device: Device) -> Iterator[FakePrefilld]:
    """Its pool is full of NaN before a prompt is written."""
    fake = FakePrefilld(daemon.decoded_socket, host, fill=float("nan"), device=device)
    with fake:
        yield fake


@pytest.fixture(scope="module")
def expected(host: ModelHost) -> list[int]:
    engine = LocalEngine(host.model, num_blocks=NUM_BLOCKS)
    (answer,) = engine.generate([PROMPT], max_tokens=MAX_TOKENS, ignore_eos=True)
    return answer


def assert_serves(daemon: Pair, peer: FakePrefilld, expected: list[int]) -> None:
    """Hand a prompt over, on a new link, and compare the answer with one process's."""
    peer.open()
    client = peer.hand_over(peer.handoff(peer.prefill(PROMPT), max_tokens=MAX_TOKENS))
    peer.link.expect(wire.Adopt)
    peer.link.expect(wire.Release)
    with client:
        *tokens, last = client.rest()
    assert isinstance(last, wire.End)
    assert [one for each in tokens if isinstance(each, wire.Tokens) for one in each.ids] == expected
    wait_until(
        lambda: (
            daemon.decoded_status()["pool"]["free"] == daemon.decoded_status()["pool"]["total"] - 1
        ),
        what="every block of decoded is free",
    )


def test_what_was_never_written_is_never_read(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    """Twice: the second answer is written over what the first one left in decoded's blocks."""
    for _ in range(2):
        assert_serves(daemon, peer, expected)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "garbage for a handle": ({"pool_handle": GARBAGE}, "handle"),
    "a handle of another length": ({"pool_handle": GARBAGE[:63]}, "handle"),
    "garbage for an event": ({"event_handles": [GARBAGE]}, "shm"),
    "a pool that is larger": ({"num_blocks": 4 * NUM_BLOCKS}, "size"),
    "a page that is larger": ({"control_slots": 4096}, "size"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_the_pool_is_refused_by_name(
    daemon: Pair, peer: FakePrefilld, expected: list[int], lie: str
) -> None:
    """And leaves a decoded that works."""
    changes, code = LIES[lie]
    peer.greet()
    peer.offer(peer.map(**changes))
    assert peer.link.expect(wire.Refuse).code == code
    assert_serves(daemon, peer, expected)


def test_more_bytes_than_the_allocation_has_are_refused(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    """The numbers agree with each other, and only the driver knows better."""
    larger = peer.layout.with_num_blocks(64 * NUM_BLOCKS)
    peer.greet()
    peer.offer(peer.map(num_blocks=larger.num_blocks, pool_bytes=larger.pool_bytes))
    refuse = peer.link.expect(wire.Refuse)
    assert refuse.code == "size"
    assert str(peer.layout.pool_bytes) in refuse.ours
    assert_serves(daemon, peer, expected)


def test_a_gpu_that_nobody_has_is_refused_by_name(
    daemon: Pair, peer: FakePrefilld, expected: list[int]
) -> None:
    peer.greet(device=NOBODYS_GPU)
    peer.offer(peer.map())
    refuse = peer.link.expect(wire.Refuse)
    assert (refuse.code, refuse.field, refuse.theirs) == ("peer-access", "device", NOBODYS_GPU)
    assert_serves(daemon, peer, expected)
