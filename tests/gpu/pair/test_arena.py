"""The arena of a GPU: every byte comes back, beside other work, and its memory is given back."""

from __future__ import annotations

import time

import pytest
import torch

from shared.engine.run_copies import RunCopies
from shared.kv.arena import PinnedArena
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.layout import KVLayout

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

DEADLINE_S = 30.0

LAYOUT = KVLayout(
    num_blocks=257, num_layers=4, num_kv_heads=4, block_size=16, head_dim=64, dtype="bfloat16"
)
"""Blocks of 64 KiB, as many as fill 16 MiB."""


def finish(copies: RunCopies, *args: object) -> None:
    """Begin a copy and look at it until it is over."""
    copy = copies.prepare(*args)  # type: ignore[arg-type]
    copy.start(is_busy=False)
    deadline_s = time.monotonic() + DEADLINE_S
    while not copy.is_done():
        assert time.monotonic() < deadline_s


def test_blocks_come_back_bit_by_bit_wherever_they_lay() -> None:
    """Scattered in the pool, scattered in the arena, and back into other blocks."""
    pool = LocalCudaPool.create(LAYOUT, device=0)
    arena = PinnedArena.create(LAYOUT, max_bytes=1 << 30)
    assert arena is not None
    assert arena.kv.is_pinned()
    pool.kv.view(torch.int16).random_()
    blocks = torch.randperm(256).add(1).tolist()[:200]
    places = torch.randperm(256).add(1).tolist()[:200]
    before = pool.kv[blocks].cpu()
    finish(RunCopies(arena.kv, pool.kv.device), pool.kv, blocks, places)
    assert torch.equal(arena.kv[places].view(torch.int16), before.view(torch.int16))
    pool.kv.zero_()
    back = torch.randperm(256).add(1).tolist()[:200]
    finish(RunCopies(pool.kv, pool.kv.device), arena.kv, places, back)
    assert torch.equal(pool.kv[back].cpu().view(torch.int16), before.view(torch.int16))
    torch.cuda.synchronize()
    arena.close()
    pool.close()


def test_a_copy_does_not_wait_for_work_on_another_stream() -> None:
    """Steps run meanwhile; it is the copy engine's own."""
    pool = LocalCudaPool.create(LAYOUT, device=0)
    arena = PinnedArena.create(LAYOUT, max_bytes=1 << 30)
    assert arena is not None
    copies = RunCopies(arena.kv, pool.kv.device)
    steps = torch.cuda.Stream(priority=-1)
    with torch.cuda.stream(steps):
        torch.cuda._sleep(2_000_000_000)  # about a second
        is_over = torch.cuda.Event()
        is_over.record(steps)
    finish(copies, pool.kv, list(range(1, 200)), list(range(1, 200)))
    assert not is_over.query()
    torch.cuda.synchronize()
    del copies  # which looks into the arena
    arena.close()
    pool.close()
