"""One turn of the engine on a CPU: copies first, then one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from decoded.lease_effects import BlockCopy
from decoded.turns import CopyJob, EagerTurns
from shared.daemon.model_host import ModelHost
from shared.engine.batch import SequenceStep
from shared.engine.decoding import DecodeStep, EagerDecoder
from shared.engine.runner import ModelRunner
from shared.kv.pool import LocalPool
from shared.ops.sampling import SamplingParams


def step(block_table: list[int], *, token_id: int | None = 5, position: int = 16) -> DecodeStep:
    return DecodeStep(
        key="a",
        token_id=token_id,
        position=position,
        block_table=block_table,
        sampling=SamplingParams(),
    )


def job(source: LocalPool, sources: list[int], targets: list[int]) -> CopyJob:
    """Return a copy out of a pool, as of a link whose peer exported it."""
    session: Any = SimpleNamespace(peer_pool=SimpleNamespace(kv=source.kv))
    copy = BlockCopy(lease_id=1, slot=0, generation=1, sources=sources, targets=targets)
    return CopyJob(session=session, copy=copy)


def turns_over(host: ModelHost, target: LocalPool) -> EagerTurns:
    return EagerTurns(EagerDecoder(ModelRunner(host.model, target.kv, host.layout)), target.kv)


def test_blocks_are_copied_before_the_step_reads_them(host: ModelHost) -> None:
    """The sequence that waited for them joins this very step."""
    source, target = LocalPool(host.layout), LocalPool(host.layout, fill=float("nan"))
    source_runner = ModelRunner(host.model, source.kv, host.layout)
    prompt = SequenceStep(
        token_ids=list(range(2, 18)), start_position=0, block_table=[3], sampling=SamplingParams()
    )
    source_runner.execute([prompt])
    next_token = SequenceStep(
        token_ids=(5,), start_position=16, block_table=[3, 4], sampling=SamplingParams()
    )
    (expected,) = source_runner.execute([next_token]).token_ids
    turns = turns_over(host, target)
    turns.submit(job(source, [3], [9]))
    result = turns.take([step([9, 10])])
    assert result.step is not None
    assert result.step.token_ids == (cast("int", expected),)
    (done,) = result.copies
    assert done.is_complete
    assert 0 < done.start_ns <= done.done_ns <= result.step.done_ns
    assert result.step.seconds > 0


def test_a_turn_may_be_all_copies(host: ModelHost) -> None:
    source, target = LocalPool(host.layout, fill=2.0), LocalPool(host.layout)
    turns = turns_over(host, target)
    jobs = [job(source, [1], [number]) for number in (4, 6)]
    for each in jobs:
        turns.submit(each)
    result = turns.take([])
    assert result.step is None
    assert [done.job for done in result.copies] == jobs
    filled = [number for number in range(16) if float(target.kv[number].min()) == 2.0]
    assert filled == [4, 6]


def test_a_step_whose_token_nobody_knows_is_a_bug(host: ModelHost) -> None:
    """On a CPU no earlier step can be in flight that would bring it."""
    turns = turns_over(host, LocalPool(host.layout))
    with pytest.raises(ValueError, match="the token to compute is not known"):
        turns.take([step([9, 10], token_id=None)])
