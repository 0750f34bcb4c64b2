"""The pool between two processes: what one writes, the other reads, and what must not open."""

from __future__ import annotations

import dataclasses
import os
import struct

import pytest

from shared.kv.layout import DTypeName, KVLayout
from tests.gpu.ipc.conftest import ALLOCATOR_VARIABLES, ONE_GPU, Pair, Start
from tests.gpu.ipc.processes import Process, WorkerError

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_bit_arrives(pair: Pair, layout: KVLayout, dtype: DTypeName) -> None:
    """NaNs with their payloads and denormals too: nothing on the way computes with them."""
    layout = dataclasses.replace(layout, dtype=dtype)
    export = pair.maker.do("create", layout)
    pair.maker.do("fill_random", 5)
    pair.reader.do("map", export, layout)
    assert pair.reader.do("digest", "mapping") == pair.maker.do("digest", "pool")
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_the_proof_passes_and_the_path_is_as_fast_as_its_kind(pair: Pair, layout: KVLayout) -> None:
    layout = layout.with_num_blocks(16_384)
    export = pair.maker.do("create", layout)
    digest = pair.maker.do("write_pattern", os.urandom(4096))
    open_ms = pair.reader.do("map", export, layout)
    assert pair.reader.do("read_digest", 4096) == digest
    rates = [pair.reader.do("bandwidth") for _ in range(2)]
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")
    linked = pair.reader.do("is_nvlink", *pair.uuids) if pair.uuids[0] != pair.uuids[1] else None
    print(f"\n{pair.place.name}: open {open_ms:.2f} ms, read {rates} GB/s, NVLink {linked}")
    assert min(rates) > (40.0 if linked is not False else 5.0)


def test_the_driver_gives_the_pool_an_allocation_of_its_own(pair: Pair, layout: KVLayout) -> None:
    """A handle opens the whole of it, so nobody else's bytes may lie there."""
    pair.maker.do("create", layout)
    assert pair.maker.do("range_of_pool") == layout.pool_bytes
    pair.maker.do("close_pool")


@pytest.mark.parametrize("offset", [256, 512 << 10, 2 * MIB])
def test_a_pool_inside_of_an_allocation_is_found(pair: Pair, layout: KVLayout, offset: int) -> None:
    """The handle of an inner address opens at the base; only the offset tells where the pool is."""
    export = pair.maker.do("create_at_offset", layout, offset)
    assert export.offset % (2 * MIB) == offset % (2 * MIB)
    pair.reader.do("map", export, layout)
    (sevens,) = struct.unpack("!f", bytes([7, 7, 0, 0]))
    assert pair.reader.do("read", 0) == pair.reader.do("read", layout.num_blocks - 1) == sevens
    pair.reader.do("close_mapping")
    pair.maker.do("free_at_offset")


def test_a_size_that_is_a_lie_is_refused(pair: Pair, layout: KVLayout) -> None:
    """Reading on behind the pool would be another's memory, or a fault that ends the process."""
    export = pair.maker.do("create", layout)
    larger = layout.with_num_blocks(4 * layout.num_blocks)
    lie = dataclasses.replace(export, num_bytes=larger.pool_bytes)
    with pytest.raises(WorkerError, match=rf"PoolMappingError.* has {layout.pool_bytes}$"):
        pair.reader.do("map", lie, larger)
    pair.reader.do("map", export, layout)
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


@pytest.mark.parametrize(
    "garbage", [b"\0" * 64, b"\xff" * 64, bytes(range(64))], ids=["zeros", "ones", "counting"]
)
def test_64_bytes_that_are_no_handle_are_refused(
    pair: Pair, layout: KVLayout, garbage: bytes
) -> None:
    """And leave a process that works."""
    export = pair.maker.do("create", layout)
    with pytest.raises(WorkerError, match=r"PoolMappingError.*handle does not open"):
        pair.reader.do("map", dataclasses.replace(export, handle=garbage), layout)
    events = (*export.event_handles[:3], garbage)
    with pytest.raises(WorkerError, match=r"PoolMappingError.*event 3 does not open"):
        pair.reader.do("map", dataclasses.replace(export, event_handles=events), layout)
    pair.maker.do("fill_random", 6)
    pair.reader.do("map", export, layout)
    assert pair.reader.do("digest", "mapping") == pair.maker.do("digest", "pool")
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_a_pool_does_not_open_where_it_was_made(pair: Pair, layout: KVLayout) -> None:
    export = pair.maker.do("create", layout)
    with pytest.raises(WorkerError, match=r"PoolMappingError.*for the one that made the handle"):
        pair.maker.do("map", export, layout)
    pair.maker.do("close_pool")


def test_memory_opens_with_one_flag_only(pair: Pair, layout: KVLayout) -> None:
    """So the border offers no choice."""
    export = pair.maker.do("create", layout)
    with pytest.raises(WorkerError, match="CUDARuntimeError: cudaErrorInvalidValue"):
        pair.reader.do("open_with_flags", export.handle, 0)
    pair.maker.do("close_pool")


def test_a_gpu_that_is_not_here_is_named(pair: Pair) -> None:
    """Whoever moved a configuration to another machine reads which GPUs this one has."""
    with pytest.raises(WorkerError, match=rf"is not among .*{pair.uuids[1]}"):
        pair.reader.do("resolve", "GPU-00000000-0000-0000-0000-000000000000")
    assert pair.reader.do("resolve", pair.uuids[1]) == pair.uuids[1]


def test_this_machine_passes_the_preflight(pair: Pair) -> None:
    """A GPU that only CUDA_VISIBLE_DEVICES hides is no obstacle."""
    found = pair.reader.do("preflight", pair.uuids[1], pair.uuids[0])
    assert found == ([("hidden-peer", False)] if pair.place.visible else [])


def test_a_view_keeps_the_mapping_open(pair: Pair, layout: KVLayout) -> None:
    """Torch's storage holds what it was made from, and that is how we know."""
    export = pair.maker.do("create", layout)
    pair.reader.do("map", export, layout)
    pair.reader.do("keep_a_view")
    with pytest.raises(WorkerError, match="PoolInUseError"):
        pair.reader.do("close_mapping")
    pair.reader.do("drop_views")
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_a_pool_can_be_mapped_twice_at_once(pair: Pair, layout: KVLayout) -> None:
    """As after a link that came back within an epoch; each close undoes one open."""
    export = pair.maker.do("create", layout, fill=4.0)
    pair.reader.do("map", export, layout)
    pair.reader.do("map_again", export, layout)
    assert pair.reader.do("read", 9) == 4.0
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


def test_a_hundred_connections_leave_no_memory_behind(pair: Pair, layout: KVLayout) -> None:
    """On either GPU."""
    export = pair.maker.do("create", layout)
    pair.reader.do("cycle", export, layout, 2)
    for process in (pair.reader, pair.maker):
        process.do("free_bytes")  # the first look makes a context on every GPU
    before = pair.reader.do("free_bytes"), pair.maker.do("free_bytes")
    pair.reader.do("cycle", export, layout, 100)
    assert (pair.reader.do("free_bytes"), pair.maker.do("free_bytes")) == before
    pair.maker.do("close_pool")


def test_a_local_pool_can_be_made_poisonous(pair: Pair, layout: KVLayout) -> None:
    """Filled with NaN, it shows whoever reads what was never written."""
    before = pair.reader.do("free_bytes")
    assert pair.reader.do("create_local", layout)
    assert pair.reader.do("free_bytes") == before


def test_a_pool_that_can_never_fit_says_how_much_there_is(pair: Pair, layout: KVLayout) -> None:
    total_bytes = pair.maker.do("total_bytes")
    larger = layout.with_num_blocks(total_bytes // layout.block_bytes + 1)
    with pytest.raises(WorkerError, match=rf"PoolAllocationError.*{total_bytes} bytes are free"):
        pair.maker.do("create", larger)


@pytest.mark.parametrize("place", [ONE_GPU], ids=lambda place: place.name, indirect=True)
@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_other_allocators_do_not_touch_the_pool(
    pair: Pair, expandable: dict[str, Process], layout: KVLayout, name: str
) -> None:
    """Their memory cannot be exported, and is refused by name; the pool is none of it."""
    maker = expandable[name]
    maker.do("begin", 0)
    maker.do("pool_allocators")
    with pytest.raises(WorkerError, match=r"PoolAllocationError.*does not let other processes"):
        maker.do("export_of_torch")
    assert ("expandable-segments", False) in maker.do("preflight", *pair.uuids)
    export = maker.do("create", layout)
    maker.do("fill_random", 7)
    pair.reader.do("map", export, layout)
    assert pair.reader.do("digest", "mapping") == maker.do("digest", "pool")
    pair.reader.do("close_mapping")


def test_a_full_gpu_refuses_the_pool_by_name_and_keeps_nothing_of_it(
    pair: Pair, layout: KVLayout
) -> None:
    """Torch has three exceptions for it; afterwards the same process maps the same pool."""
    export = pair.maker.do("create", layout)
    digest = pair.maker.do("write_pattern", os.urandom(4096))
    code, words = pair.reader.do("refused_while_full", export, layout)
    print(f"\n{pair.place.name}: {words}")
    assert code == "memory"
    assert "the GPU's memory is full" in words
    pair.reader.do("map", export, layout)
    assert pair.reader.do("read_digest", 4096) == digest
    pair.reader.do("close_mapping")
    pair.maker.do("close_pool")


@pytest.mark.parametrize("place", [ONE_GPU], ids=lambda place: place.name, indirect=True)
def test_a_lost_gpu_is_told_as_such(pair: Pair, start: Start, layout: KVLayout) -> None:
    """By torch's exception and by every later call of ours."""
    maker = start(pair.place, 0)
    maker.do("create", layout)
    assert maker.do("fault") == 710
    with pytest.raises(WorkerError, match=r"GpuFatalError.* 710"):
        maker.do("record")
    maker.kill()
