"""Tests of shared/kv/cuda_ipc.py; test_pool.py holds it to what every pool must do."""

from __future__ import annotations

import dataclasses
import gc

import pytest

from shared.kv.cuda_export import MAX_NUM_EVENTS
from shared.kv.cuda_ipc import CudaIpcMapping, CudaIpcPool, PoolExport
from shared.kv.errors import (
    CudaCallError,
    CudaUnavailableError,
    GpuFatalError,
    MappingFault,
    PoolAllocationError,
    PoolClosedError,
    PoolInUseError,
    PoolMappingError,
    UnknownEventError,
)
from shared.kv.layout import KVLayout
from tests.support.fake_cuda import FakeCuda, FakeGpus

STREAM = 77


@pytest.fixture
def gpus() -> FakeGpus:
    return FakeGpus()


@pytest.fixture
def maker(gpus: FakeGpus) -> FakeCuda:
    """Prefilld's process."""
    return FakeCuda(gpus)


@pytest.fixture
def reader(gpus: FakeGpus) -> FakeCuda:
    """Decoded's process."""
    return FakeCuda(gpus)


@pytest.fixture
def pool(maker: FakeCuda, layout: KVLayout) -> CudaIpcPool:
    return CudaIpcPool.create(layout, device=1, num_events=3, runtime=maker)


def open_mapping(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout, **changes: object
) -> CudaIpcMapping:
    export = dataclasses.replace(pool.export(), **changes)  # type: ignore[arg-type]
    return CudaIpcMapping.open(export, layout, device=0, runtime=reader)


def test_a_mapping_shows_what_the_pool_holds(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """Nothing is copied: a block written after the mapping was made is seen as well."""
    mapping = open_mapping(reader, pool, layout)
    pool.kv[7, 1, 1, 2, 3, 0] = 2.5
    assert mapping.kv[7, 1, 1, 2, 3, 0] == 2.5
    mapping.close()
    pool.close()


def test_the_offset_travels_where_the_pool_is_not_at_its_allocations_base(
    gpus: FakeGpus, reader: FakeCuda, layout: KVLayout
) -> None:
    """A handle opens at the base, whatever address it was made from."""
    maker = FakeCuda(gpus, base_gap=4096)
    pool = CudaIpcPool.create(layout, device=0, fill=1.0, runtime=maker)
    assert pool.export().offset == 4096
    mapping = open_mapping(reader, pool, layout)
    assert (mapping.kv == 1.0).all()
    mapping.close()
    pool.close()


def test_a_driver_that_does_not_tell_ranges_is_believed(
    maker: FakeCuda, reader: FakeCuda, layout: KVLayout
) -> None:
    """The proof at hand-shake is still to come."""
    maker.can_tell_ranges = reader.can_tell_ranges = False
    pool = CudaIpcPool.create(layout, device=0, runtime=maker)
    assert pool.export().offset == 0
    open_mapping(reader, pool, layout).close()


def test_handles_are_never_shown(pool: CudaIpcPool) -> None:
    """Whoever reads a log must not be able to read every prompt."""
    export = pool.export()
    assert repr(export) == f"PoolExport(offset=0, num_bytes={export.num_bytes})"


def test_two_pools_are_told_apart_by_more_than_their_handles(
    gpus: FakeGpus, layout: KVLayout
) -> None:
    """Two pools of one process may even have equal handles: nobody may compare those."""
    one, two = (CudaIpcPool.create(layout, device=0, runtime=FakeCuda(gpus)) for _ in range(2))
    same = dataclasses.replace(two.export(), handle=one.export().handle)
    mapping = CudaIpcMapping.open(same, layout, device=0, runtime=FakeCuda(gpus))
    one.kv.fill_(1.0)
    assert (mapping.kv == 1.0).all(), "what counts is which memory opens, which the proof shows"


# --- making ---------------------------------------------------------------------------------


def test_a_pool_is_rounded_up_to_memory_of_its_own(pool: CudaIpcPool, maker: FakeCuda) -> None:
    """The handle opens the driver's whole allocation, and nobody else's data may lie in it."""
    assert pool.export().num_bytes == 2 << 20
    assert maker.gpus.held_bytes == 2 << 20


def test_a_pool_without_room_says_how_much_there_is(maker: FakeCuda, layout: KVLayout) -> None:
    maker.gpus.total_bytes = 1 << 20
    with pytest.raises(PoolAllocationError, match="1048576 of the GPU's 1048576 bytes are free"):
        CudaIpcPool.create(layout, device=0, runtime=maker)


def test_memory_that_cannot_be_exported_is_refused_and_given_back(
    maker: FakeCuda, layout: KVLayout
) -> None:
    maker.can_export = False
    with pytest.raises(PoolAllocationError, match="does not let other processes open"):
        CudaIpcPool.create(layout, device=0, runtime=maker)
    assert maker.gpus.held_bytes == 0


def test_an_allocation_that_ends_before_the_pool_is_refused(
    maker: FakeCuda, layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer would read whatever lies behind it."""
    from shared.kv.cuda_driver import AddressRange

    monkeypatch.setattr(maker, "address_range", lambda address: AddressRange(address - 512, 4096))
    with pytest.raises(PoolAllocationError, match="has 4096 bytes, the pool begins at 512"):
        CudaIpcPool.create(layout, device=0, runtime=maker)
    assert maker.gpus.held_bytes == 0


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ("use_device", 46, CudaUnavailableError),
        ("allocate", 700, GpuFatalError),
        ("export_memory", 1, CudaCallError),
        ("create_event", 304, CudaUnavailableError),
        ("export_event", 1, CudaCallError),
        ("view", 1, CudaCallError),
        ("synchronize", 719, GpuFatalError),
    ],
)
@pytest.mark.parametrize("calls_before", [0, 2])
def test_what_was_made_before_a_failure_is_given_back(
    maker: FakeCuda,
    layout: KVLayout,
    call: str,
    status: int,
    error: type[CudaCallError],
    calls_before: int,
) -> None:
    """A daemon that retries must not find its own remains in its way."""
    maker.fails[call] = status
    maker.fails_after[call] = calls_before if call.endswith("event") else 0
    with pytest.raises(error, match=f"CUDA error {status}"):
        CudaIpcPool.create(layout, device=0, num_events=3, fill=0.0, runtime=maker)
    assert (maker.gpus.held_bytes, maker.num_events) == (0, 0)


@pytest.mark.parametrize("num_events", [0, -1, MAX_NUM_EVENTS + 1])
def test_a_ring_that_cannot_be_is_refused(
    maker: FakeCuda, layout: KVLayout, num_events: int
) -> None:
    with pytest.raises(ValueError, match=f"a ring of {num_events} events"):
        CudaIpcPool.create(layout, device=0, num_events=num_events, runtime=maker)
    assert maker.calls == []


def test_closing_gives_everything_back_once(pool: CudaIpcPool, maker: FakeCuda) -> None:
    pool.close()
    pool.close()
    assert (maker.gpus.held_bytes, maker.num_events) == (0, 0)
    assert maker.calls.count("free") == 1
    with pytest.raises(PoolClosedError, match="the pool is closed"):
        pool.export()
    with pytest.raises(PoolClosedError, match="the pool is closed"):
        pool.record(STREAM)


def test_events_live_as_long_as_the_pool(maker: FakeCuda, pool: CudaIpcPool) -> None:
    """One that is destroyed before the peer has opened it is undefined behaviour."""
    pool.export()
    gc.collect()
    assert maker.num_events == 3


# --- the ring -------------------------------------------------------------------------------


def test_slots_come_round_in_order(
    maker: FakeCuda, reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    mapping = open_mapping(reader, pool, layout)
    assert mapping.num_events == 3
    assert [pool.record(STREAM) for _ in range(4)] == [0, 1, 2, 0]
    assert [maker.event(slot).streams for slot in range(3)] == [[STREAM] * 2, [STREAM], [STREAM]]
    mapping.close()


def test_a_slot_is_not_done_until_its_work_is(
    maker: FakeCuda, reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    mapping = open_mapping(reader, pool, layout)
    slot = pool.record(STREAM)
    assert not mapping.is_done(slot)
    maker.event(slot).status = 0
    assert mapping.is_done(slot)
    mapping.close()


def test_a_record_that_failed_takes_no_slot(maker: FakeCuda, pool: CudaIpcPool) -> None:
    """Its slot must not be announced: an event that was never recorded counts as complete."""
    maker.fails["record_event"] = 400
    with pytest.raises(CudaCallError, match="the handle is not valid"):
        pool.record(STREAM)
    maker.fails.clear()
    assert pool.record(STREAM) == 0


@pytest.mark.parametrize("status", [700, 719, 999])
def test_an_event_that_failed_is_not_waited_for(
    maker: FakeCuda, reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout, status: int
) -> None:
    """Taken for `not ready` it would be polled for ever."""
    mapping = open_mapping(reader, pool, layout)
    maker.event(pool.record(STREAM)).status = status
    with pytest.raises(GpuFatalError, match=f"CUDA error {status}"):
        mapping.is_done(0)


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_slot_outside_the_ring_is_named(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout, slot: int
) -> None:
    """It comes off the wire."""
    mapping = open_mapping(reader, pool, layout)
    with pytest.raises(UnknownEventError, match=f"event {slot} is not in a ring of 3"):
        mapping.is_done(slot)
    mapping.close()
    with pytest.raises(PoolClosedError, match="the peer's pool is closed"):
        mapping.is_done(0)


# --- opening --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "fault", "message"),
    [
        ({"num_bytes": 4 << 20}, MappingFault.SIZE, "announced with 4194304 bytes; 8 blocks"),
        ({"offset": -256}, MappingFault.SIZE, "at offset -256"),
        ({"offset": 128}, MappingFault.SIZE, "at offset 128, which is no multiple of 256"),
        ({"offset": 256}, MappingFault.SIZE, "at offset 256; the allocation has 2097152"),
        ({"offset": 1 << 62}, MappingFault.SIZE, "the allocation has 2097152"),
        ({"handle": b"x" * 64}, MappingFault.HANDLE, "the pool's handle does not open"),
        ({"handle": b"x" * 63}, MappingFault.HANDLE, "a handle has 63 bytes, not 64"),
        ({"event_handles": ()}, MappingFault.EVENTS, "announced with 0 events"),
        ({"event_handles": (b"x" * 64,)}, MappingFault.EVENTS, "event 0 does not open"),
        ({"event_handles": (b"",)}, MappingFault.HANDLE, "a handle has 0 bytes"),
        ({"event_handles": (b"x" * 64,) * 4097}, MappingFault.EVENTS, "announced with 4097"),
    ],
)
def test_what_is_not_as_announced_is_refused_and_closed_again(
    reader: FakeCuda,
    pool: CudaIpcPool,
    layout: KVLayout,
    changes: dict[str, object],
    fault: MappingFault,
    message: str,
) -> None:
    with pytest.raises(PoolMappingError, match=message) as caught:
        open_mapping(reader, pool, layout, **changes)
    assert caught.value.fault is fault
    assert reader.num_events == 0
    pool.close()
    assert reader.gpus.held_bytes == 0, "a mapping that is left over keeps the memory"


def test_a_pool_larger_than_its_allocation_is_refused(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """The peer's word about both blocks and bytes may be a lie."""
    larger = layout.with_num_blocks(10_000)
    with pytest.raises(PoolMappingError, match="the allocation has 2097152"):
        open_mapping(reader, pool, larger, num_bytes=larger.pool_bytes)


@pytest.mark.parametrize(
    ("status", "fault", "message"),
    [
        (1, MappingFault.HANDLE, "an argument is not valid"),
        (400, MappingFault.HANDLE, "the handle is not valid"),
        (201, MappingFault.SELF, "two daemons need two pids"),
        (101, MappingFault.PEER, "no such GPU here"),
        (205, MappingFault.PEER, "hidden from this process"),
        (217, MappingFault.PEER, "use one GPU for both daemons, or another pair"),
        (208, MappingFault.MAP, "mapped already"),
        (801, MappingFault.MAP, "WSL, Tegra"),
    ],
)
def test_a_handle_that_does_not_open_says_why(
    reader: FakeCuda,
    pool: CudaIpcPool,
    layout: KVLayout,
    status: int,
    fault: MappingFault,
    message: str,
) -> None:
    reader.fails["open_memory"] = status
    with pytest.raises(PoolMappingError, match=message) as caught:
        open_mapping(reader, pool, layout)
    assert caught.value.fault is fault


def test_a_pool_does_not_open_in_the_process_that_made_it(
    maker: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    with pytest.raises(PoolMappingError, match="for the one that made the handle") as caught:
        open_mapping(maker, pool, layout)
    assert caught.value.fault is MappingFault.SELF


@pytest.mark.parametrize(
    ("call", "calls_before"), [("use_device", 0), ("open_memory", 0), ("open_event", 2)]
)
def test_a_lost_gpu_is_no_fault_of_the_peer(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout, call: str, calls_before: int
) -> None:
    """A refusal would hide that this process must end."""
    reader.fails[call], reader.fails_after[call] = 700, calls_before
    with pytest.raises(GpuFatalError, match="illegal address"):
        open_mapping(reader, pool, layout)
    assert reader.num_events == 0


def test_an_event_that_does_not_open_closes_what_did(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """As where /dev/shm is not shared: memory opens, events do not."""
    reader.fails["open_event"], reader.fails_after["open_event"] = 205, 2
    with pytest.raises(
        PoolMappingError, match=r"event 2 does not open \(CUDA error 205\).*/dev/shm"
    ) as caught:
        open_mapping(reader, pool, layout)
    assert caught.value.fault is MappingFault.EVENTS
    assert reader.num_events == 0
    assert reader.calls.count("close_memory") == 1


# --- closing --------------------------------------------------------------------------------


def test_a_mapping_is_closed_exactly_once(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """The driver counts: one close too many unmaps somebody else's."""
    mapping = open_mapping(reader, pool, layout)
    mapping.close()
    mapping.close()
    assert reader.calls.count("close_memory") == reader.calls.count("open_memory") == 1
    assert reader.num_events == 0


def test_a_mapping_in_use_closes_nothing_until_it_is_not(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """Any view counts, and one of its raw bytes too."""
    mapping = open_mapping(reader, pool, layout)
    view = mapping.kv[2].view(-1)[3:]
    for _ in range(2):
        with pytest.raises(PoolInUseError, match="the peer's pool cannot be unmapped"):
            mapping.close()
    assert "close_memory" not in reader.calls
    assert view.sum() == 0.0
    del view
    mapping.close()
    assert reader.calls.count("close_memory") == 1


def test_a_mapping_outlives_the_pool_and_holds_its_memory(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """So the peer's successor cannot allocate until we let go."""
    mapping = open_mapping(reader, pool, layout)
    pool.kv.fill_(3.0)
    pool.close()
    assert (mapping.kv == 3.0).all()
    assert reader.gpus.held_bytes == layout.pool_bytes
    mapping.close()
    assert reader.gpus.held_bytes == 0


def test_a_pool_can_be_mapped_again_while_an_old_mapping_lives(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """A link that comes back within an epoch finds blocks of the old one still being read."""
    old, new = (open_mapping(reader, pool, layout) for _ in range(2))
    old.close()
    assert new.kv.sum() == 0.0
    new.close()
    assert reader.calls.count("close_memory") == 2


def test_closing_goes_on_where_one_step_fails(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """What is not given back here is never given back."""
    mapping = open_mapping(reader, pool, layout)
    reader.fails["destroy_event"] = 400
    with pytest.raises(CudaCallError, match="destroy_event failed"):
        mapping.close()
    assert reader.calls.count("destroy_event") == 3
    assert reader.calls.count("close_memory") == 1
    mapping.close()
    assert reader.calls.count("close_memory") == 1


def test_the_gpu_is_made_current_before_anything_else(
    reader: FakeCuda, pool: CudaIpcPool, layout: KVLayout
) -> None:
    """A mapping belongs to the device that was current when it was opened."""
    mapping = open_mapping(reader, pool, layout)
    assert reader.calls[0] == "use_device"
    reader.device, reader.calls[:] = 5, []
    mapping.close()
    assert (reader.device, reader.calls[0]) == (0, "use_device")


def test_an_export_is_a_value() -> None:
    export = PoolExport(b"h" * 64, 0, 2, (b"e" * 64,))
    assert export == PoolExport(b"h" * 64, 0, 2, (b"e" * 64,))
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign"):
        export.offset = 1  # type: ignore[misc]
