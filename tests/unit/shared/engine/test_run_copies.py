"""Copies between a pool and the arena: some at a time, and every block arrives."""

from __future__ import annotations

import pytest
import torch

from shared.engine.run_copies import RUNS_AT_ONCE, RunCopies, RunCopy
from shared.kv.errors import CopyError
from shared.kv.pull import runs
from tests.support.timed_stream import WORK_MS, TimedStream

NUM_BLOCKS = 100


def pool(fill: float) -> torch.Tensor:
    kv = torch.full((NUM_BLOCKS, 2, 2, 1, 4, 8), fill)
    return kv + torch.arange(NUM_BLOCKS).view(-1, 1, 1, 1, 1, 1)


def test_neighbouring_blocks_arrive_as_one() -> None:
    source, target = pool(1000), pool(0)
    copies = RunCopies(target, target.device)
    copy = copies.prepare(source, [3, 4, 5, 9], [7, 8, 9, 1])
    assert not copy.is_done(), "it has not begun"
    copy.start(is_busy=True)
    assert copy.is_done()
    assert copy.device_ns() is None, "a CPU copied"
    assert [float(target[block].min()) for block in (7, 8, 9, 1)] == [1003, 1004, 1005, 1009]
    assert float(target[2].max()) == 2


def test_many_scattered_blocks_are_enqueued_some_at_a_time() -> None:
    """The thread that enqueues them launches steps as well."""
    source, target = pool(1000), pool(0)
    sources = list(range(1, NUM_BLOCKS, 2))
    targets = sources[::-1]
    copy = RunCopies(target, target.device).prepare(source, sources, targets)
    copy.start(is_busy=False)
    num_looks = 1
    while not copy.is_done():
        num_looks += 1
    assert num_looks == -(-len(sources) // RUNS_AT_ONCE)
    for come_from, gone_to in zip(sources, targets, strict=True):
        assert float(target[gone_to].min()) == 1000 + come_from


def test_what_does_not_fit_together_is_refused_before_anything_moves() -> None:
    target = pool(0)
    with pytest.raises(CopyError, match="source block 100"):
        RunCopies(target, target.device).prepare(pool(1), [1, NUM_BLOCKS], [1, 2])


def test_a_copy_took_what_its_lots_took_and_not_what_passed_between_them() -> None:
    """The copy engine waits for the host to enqueue the next lot; that is not its time."""
    stream, num_lots = TimedStream(), 3
    sources = list(range(1, 2 * RUNS_AT_ONCE * num_lots, 2))
    copy = RunCopy(stream, pool(1000), pool(0), runs(sources, sources[::-1]))
    copy.start(is_busy=True)
    for _ in range(num_lots - 1):
        assert not copy.is_done()
        stream.fake.run()
        assert not copy.is_done(), "the next lot is enqueued"
    stream.fake.run()
    assert copy.is_done()
    assert copy.is_done(), "asking again changes nothing"
    assert copy.device_ns() == num_lots * WORK_MS * 1e6
