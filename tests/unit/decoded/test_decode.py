"""One turn of the engine: copies first, then one step."""

from __future__ import annotations

from decoded.decode import CopyJob, run_turn
from decoded.lease_effects import BlockCopy
from shared.daemon.model_host import ModelHost
from shared.engine.batch import SequenceStep
from shared.engine.runner import ModelRunner
from shared.kv.pool import LocalPool
from shared.ops.sampling import SamplingParams


def step(block_table: list[int], *, start: int = 16) -> SequenceStep:
    return SequenceStep(
        token_ids=(5,), start_position=start, block_table=block_table, sampling=SamplingParams()
    )


def test_blocks_are_copied_before_the_step_reads_them(host: ModelHost) -> None:
    """The sequence that waited for them joins this very step."""
    source, target = LocalPool(host.layout), LocalPool(host.layout, fill=float("nan"))
    prompt = SequenceStep(
        token_ids=list(range(2, 18)), start_position=0, block_table=[3], sampling=SamplingParams()
    )
    source_runner = ModelRunner(host.model, source.kv, host.layout)
    source_runner.execute([prompt])
    (expected,) = source_runner.execute([step([3, 4])]).token_ids
    copy = BlockCopy(lease_id=1, slot=0, generation=1, sources=[3], targets=[9])
    result = run_turn(
        ModelRunner(host.model, target.kv, host.layout),
        target.kv,
        [CopyJob(source=source.kv, copy=copy)],
        [step([9, 10])],
    )
    assert result.token_ids == (expected,)
    assert 0 < result.copy_start_ns <= result.copy_done_ns <= result.step_done_ns


def test_a_turn_may_be_all_copies(host: ModelHost) -> None:
    source, target = LocalPool(host.layout, fill=2.0), LocalPool(host.layout)
    copies = [
        CopyJob(
            source=source.kv,
            copy=BlockCopy(lease_id=1, slot=0, generation=1, sources=[1], targets=[number]),
        )
        for number in (4, 6)
    ]
    runner = ModelRunner(host.model, target.kv, host.layout)
    result = run_turn(runner, target.kv, copies, [])
    assert result.token_ids == ()
    filled = [number for number in range(16) if float(target.kv[number].min()) == 2.0]
    assert filled == [4, 6]
