"""prefilld's pool as decoded sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from decoded.lease_effects import BlockCopy
from decoded.mapping import PeerPool, map_pool
from protocol import messages as wire
from shared.daemon.devices import CPU_DEVICE, Device
from shared.kv.control_page import ControlPage
from shared.kv.cuda_ipc import CudaIpcPool
from shared.kv.cuda_runtime import CupyRuntime
from shared.kv.errors import LayoutError, PoolMappingError
from shared.kv.layout import KVLayout
from shared.kv.memfd import MemfdPool
from shared.kv.proof import write_pattern
from tests.support.fake_cuda import FakeCuda, FakeGpus

LAYOUT = KVLayout(
    num_blocks=99, num_layers=2, num_kv_heads=1, block_size=4, head_dim=4, dtype="float32"
)
PEER_LAYOUT = LAYOUT.with_num_blocks(8)


@dataclass
class Peer:
    """prefilld's side of a mapping."""

    pool: MemfdPool
    page: ControlPage
    fds: list[int]

    def map_message(self, **changes: Any) -> wire.Map:  # noqa: ANN401 - MAP's fields
        message = wire.Map(
            pool_bytes=PEER_LAYOUT.pool_bytes,
            offset=0,
            num_blocks=8,
            control_slots=4,
            proof_bytes=64,
        )
        return msgspec.structs.replace(message, **changes)


@pytest.fixture
def peer() -> Iterator[Peer]:
    pool, page = MemfdPool.create(PEER_LAYOUT), ControlPage.create(4)
    fds = [pool.export(), page.export()]
    yield Peer(pool, page, fds)
    for fd in fds:
        os.close(fd)
    pool.close()
    page.close()


def try_to_map(
    message: wire.Map,
    fds: list[int],
    *,
    device: Device = CPU_DEVICE,
    peer_device: str = "cpu",
    peer_driver: str = "",
    min_bandwidth_gb_s: float | None = None,
) -> PeerPool | wire.Refuse:
    """Map what a peer tells of its pool, as a link does; the peer keeps its own descriptors."""
    return map_pool(
        message,
        [os.dup(fd) for fd in fds],
        layout=LAYOUT,
        device=device,
        peer_device=peer_device,
        peer_driver=peer_driver,
        min_bandwidth_gb_s=min_bandwidth_gb_s,
    )


def test_a_mapping_reads_the_proof_and_the_blocks(peer: Peer) -> None:
    """Its own pool may be of another size."""
    digest = write_pattern(peer.pool, b"p" * 64)
    mapped = PeerPool(peer.map_message(), peer.fds, LAYOUT, CPU_DEVICE)
    assert mapped.digest == digest
    assert mapped.bandwidth_gb_s > 0
    assert (mapped.layout.num_blocks, mapped.num_slots) == (8, 4)
    peer.pool.kv[3] = 1.5
    assert float(mapped.kv[3].min()) == 1.5
    assert mapped.close()


def test_a_copy_is_valid_only_under_the_generation_on_the_page(peer: Peer) -> None:
    mapped = PeerPool(peer.map_message(), peer.fds, LAYOUT, CPU_DEVICE)
    copy = BlockCopy(lease_id=1, slot=2, generation=1, sources=[1], targets=[1])
    assert not mapped.is_valid(copy)
    peer.page.publish(2, 1)
    assert mapped.is_valid(copy)
    peer.page.publish(2, 2)
    assert not mapped.is_valid(copy)
    assert mapped.close()


def test_a_mapping_outlives_its_descriptors_and_its_maker(peer: Peer) -> None:
    """Prefilld may die; what was adopted is still pulled."""
    peer.pool.kv[3] = 2.5
    mapped = PeerPool(peer.map_message(), peer.fds, LAYOUT, CPU_DEVICE)
    peer.pool.close()
    assert float(mapped.kv[3].max()) == 2.5
    assert mapped.close()


def test_a_mapping_that_is_still_looked_into_is_closed_later(peer: Peer) -> None:
    mapped = PeerPool(peer.map_message(), peer.fds, LAYOUT, CPU_DEVICE)
    tensor = mapped.kv
    assert not mapped.close()
    assert float(tensor[1].sum()) == 0, "the memory is still there"
    del tensor
    assert mapped.close()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"pool_bytes": 1 << 22}, "announced with 4194304 bytes"),
        ({"num_blocks": 1 << 20}, "1048576 blocks of this layout"),
        ({"control_slots": 5}, "the control page has 64 bytes, and must have 80"),
        ({"proof_bytes": 4096}, "a proof of 4096 bytes does not fit"),
    ],
)
def test_a_pool_that_is_not_as_announced_is_not_mapped(
    peer: Peer, changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(PoolMappingError, match=fault):
        PeerPool(peer.map_message(**changes), peer.fds, LAYOUT, CPU_DEVICE)


def test_a_pool_that_cannot_be_is_refused(peer: Peer) -> None:
    with pytest.raises(LayoutError, match="num_blocks"):
        PeerPool(peer.map_message(num_blocks=1), peer.fds, LAYOUT, CPU_DEVICE)


def test_descriptors_in_the_wrong_order_are_no_pool(peer: Peer) -> None:
    with pytest.raises(PoolMappingError, match="the pool has 64 bytes"):
        PeerPool(peer.map_message(), peer.fds[::-1], LAYOUT, CPU_DEVICE)


def test_a_gpus_pool_that_does_not_open_is_refused_with_its_own_code(peer: Peer) -> None:
    """What is wrong with it decides what to do about it."""
    refuse = try_to_map(
        peer.map_message(pool_handle=b"h" * 63, event_handles=[b"e" * 64]),
        peer.fds,
        device=Device(name="GPU-a", index=0, driver="13.0"),
        peer_device="GPU-a",
        peer_driver="12.8",
    )
    assert isinstance(refuse, wire.Refuse)
    assert refuse.code == "handle"
    assert refuse.ours == "a handle has 63 bytes, not 64 (CUDA 13.0)"
    assert (refuse.theirs, refuse.message[-25:]) == ("CUDA 12.8", "; or give both one driver")


def test_a_gpu_that_is_not_in_this_machine_is_named(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything of it is opened; with both UUIDs, so that one sees which is wrong."""
    monkeypatch.setattr("decoded.mapping.is_foreign", lambda _, theirs: theirs == "GPU-b")
    refuse = try_to_map(
        peer.map_message(pool_handle=b"h" * 64, event_handles=[b"e" * 64]),
        peer.fds,
        device=Device(name="GPU-a", index=0),
        peer_device="GPU-b",
        peer_driver="13.0",
    )
    assert isinstance(refuse, wire.Refuse)
    assert (refuse.code, refuse.field) == ("peer-access", "device")
    assert (refuse.ours, refuse.theirs) == ("GPU-a", "GPU-b")


@pytest.mark.parametrize(("floor_gb_s", "is_taken"), [(None, True), (0.0, True), (1e6, False)])
def test_the_floor_is_what_is_configured_or_goes_by_the_path(
    peer: Peer, floor_gb_s: float | None, is_taken: bool
) -> None:
    """Shared memory has one kind of path, and takes any."""
    pool = try_to_map(
        peer.map_message(),
        peer.fds,
        min_bandwidth_gb_s=floor_gb_s,
    )
    if is_taken:
        assert isinstance(pool, PeerPool)
        assert pool.close()
    else:
        assert isinstance(pool, wire.Refuse)
        assert pool.code == "slow-link"


# --- too little memory --------------------------------------------------------------------------


def mapped_pools() -> int:
    """Return how often a pool is mapped into this process."""
    return Path("/proc/self/maps").read_text().count("memfd:kvpair-pool")


@pytest.mark.parametrize("call", ["hashlib.sha256", "numpy.copyto"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
        torch.AcceleratorError("CUDA error: out of memory"),
    ],
)
def test_a_pool_that_there_is_no_room_to_prove_is_refused_and_unmapped(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, call: str, error: Exception
) -> None:
    """On a full GPU the proof is the first to need memory.

    What the exception holds must not keep prefilld's pool from its successor.
    """
    num_mapped = mapped_pools()
    with monkeypatch.context() as patch:
        patch.setattr(call, raising(error))
        refuse = try_to_map(
            peer.map_message(),
            peer.fds,
        )
    assert isinstance(refuse, wire.Refuse)
    assert refuse.code == "memory"
    assert "reading prefilld's pool failed with CUDA error 2" in refuse.ours
    assert mapped_pools() == num_mapped


@pytest.mark.parametrize(
    ("call", "status", "code"),
    [
        ("open_memory", 2, "memory"),
        ("open_event", 2, "memory"),
        ("view", 2, "memory"),
        ("use_device", 1, "size"),
    ],
)
def test_a_gpus_pool_that_there_is_no_room_to_map_is_refused(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, call: str, status: int, code: str
) -> None:
    """The daemon lives on, and nothing of the pool stays open."""
    gpus = FakeGpus()
    theirs, ours = FakeCuda(gpus), FakeCuda(gpus)
    pool = CudaIpcPool.create(PEER_LAYOUT, device=0, num_events=2, runtime=theirs)
    export = pool.export()
    ours.fails[call] = status
    monkeypatch.setattr(CupyRuntime, "load", classmethod(lambda _: ours))
    refuse = try_to_map(
        peer.map_message(
            pool_bytes=export.num_bytes,
            offset=export.offset,
            pool_handle=export.handle,
            event_handles=list(export.event_handles),
        ),
        peer.fds[-1:],
        device=Device(name="GPU-a", index=0),
        peer_device="GPU-a",
    )
    assert isinstance(refuse, wire.Refuse)
    assert refuse.code == code
    pool.close()
    assert gpus.held_bytes == 0


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object, **__: object) -> None:
        raise error

    return call
