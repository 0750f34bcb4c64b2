"""Who reads when, and what is left when a process dies."""

from __future__ import annotations

import time

import pytest

from shared.kv.layout import KVLayout
from tests.gpu.ipc.conftest import ALL_VISIBLE, Pair, Start
from tests.gpu.ipc.processes import WorkerError

pytestmark = pytest.mark.gpu

ROUNDS = 20
SPIN_MS = 20.0
"""Long against what a message takes."""

TEARDOWN_S = 20.0
"""Until the memory of a reader that was killed must be back."""


def test_reading_without_asking_the_event_reads_what_was_there_before(
    pair: Pair, layout: KVLayout
) -> None:
    """The test of the test below: the write is late indeed."""
    export = pair.maker.do("create", layout, fill=-1.0)
    pair.reader.do("map", export, layout)
    pair.reader.do("read", 5)  # loads the kernel, which takes longer than the writer spins
    stale = 0
    for value in range(ROUNDS):
        slot = pair.maker.do("write", 5, float(value), after_ms=SPIN_MS)
        stale += pair.reader.do("read", 5) != value
        pair.reader.do("read_when_done", slot, 5)
    assert stale == ROUNDS
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_reading_after_the_event_never_does(pair: Pair, layout: KVLayout) -> None:
    """The ring comes round many times meanwhile."""
    export = pair.maker.do("create", layout, fill=-1.0, num_events=3)
    pair.reader.do("map", export, layout)
    for value in range(ROUNDS):
        slot = pair.maker.do("write", 5, float(value), after_ms=SPIN_MS)
        assert slot == value % 3
        assert pair.reader.do("read_when_done", slot, 5) == value
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_asking_an_event_leaves_no_error_behind(pair: Pair, layout: KVLayout) -> None:
    """`Not ready` must not turn up as the failure of somebody's next kernel."""
    export = pair.maker.do("create", layout)
    pair.reader.do("map", export, layout)
    slot = pair.maker.do("write", 5, 1.0, after_ms=200.0)
    assert pair.reader.do("ask_and_compute", slot) == (False, 1000.0)
    assert pair.reader.do("read_when_done", slot, 5) == 1.0
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


@pytest.mark.parametrize("place", ALL_VISIBLE, ids=lambda place: place.name, indirect=True)
def test_a_killed_writer_with_its_event_pending_hurts_nobody(
    pair: Pair, start: Start, layout: KVLayout
) -> None:
    """The reader goes on, lets go at once, and then the same 60 % of the GPU are free again."""
    maker, successor = start(pair.place, 0), start(pair.place, 0)
    large = layout.with_num_blocks(int(maker.do("total_bytes") * 0.6) // layout.block_bytes)
    export = maker.do("create", large)
    pair.reader.do("map", export, large)
    slot = maker.do("write", 5, 1.0)
    assert pair.reader.do("read_when_done", slot, 5) == 1.0
    slot = maker.do("write", 5, 2.0, after_ms=5_000.0)
    maker.kill()
    assert not pair.reader.do("is_done", slot)
    assert pair.reader.do("ask_and_compute", slot) == (False, 1000.0)
    assert pair.reader.do("read", 5) == 1.0, "the mapping outlives its maker"
    with pytest.raises(WorkerError, match=r"PoolShortageError.*bytes are free"):
        successor.do("create", large, patience_s=0.0)
    closing_s = pair.reader.do("close_mapping")
    began_s = time.monotonic()
    export = successor.do("create", large)
    print(f"\n{pair.place.name}: closed in {closing_s:.3f} s, ", end="")
    print(f"allocated {time.monotonic() - began_s:.3f} s later")
    assert closing_s < 1.0
    successor.do("fill_random", 8)
    pair.reader.do("map", export, large)
    pair.reader.do("close_mapping")
    successor.do("close_pool")


@pytest.mark.parametrize("place", ALL_VISIBLE, ids=lambda place: place.name, indirect=True)
def test_a_killed_reader_leaves_the_pool_alone(pair: Pair, start: Start, layout: KVLayout) -> None:
    """Its mapping goes with it; what it held is free once the pool is closed."""
    before = pair.maker.do("free_bytes")[pair.place.indices[0]]
    export = pair.maker.do("create", layout)
    pair.maker.do("fill_random", 9)
    digest = pair.maker.do("digest", "pool")
    reader = start(pair.place, 1)
    reader.do("map", export, layout)
    reader.kill()
    assert pair.maker.do("digest", "pool") == digest
    pair.maker.do("close_pool")
    ends_s = time.monotonic() + TEARDOWN_S
    while pair.maker.do("free_bytes")[pair.place.indices[0]] < before:
        assert time.monotonic() < ends_s, "the memory did not come back"
