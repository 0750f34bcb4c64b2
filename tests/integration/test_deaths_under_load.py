"""Either daemon killed under sixteen streams and long prompts, on the CPU.

`tests.benchmarks.gpu_shown` does the same on GPUs, with a model of eight billion parameters.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.deaths import Load, check_deaths

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_no_answer_is_lost_and_everything_comes_back(tmp_path: Path, tiny_model: Path) -> None:
    """The dead one's memory is let go, what was lent to it is free again, and its successor comes.

    That one is started at the kill, and neither refused nor short of memory.
    """
    load = Load(
        model=str(tiny_model),
        devices=("cpu", "cpu"),
        vocab_size=250,
        stream_tokens=2000,
        stream_prompt_tokens=30,
        num_long=6,
        long_prompt_tokens=1200,
        settings={"pool.num_blocks": 1500, "decoded.num_blocks": 4000, "prefilld.token_budget": 64},
    )
    figures = check_deaths(tmp_path, load)
    print("".join(f"\n{name}: {value:.4g}" for name, value in figures.items()))
    assert figures["prefilld_killed_answers"] == figures["decoded_killed_answers"] == 22
    assert figures["prefilld_killed_starts"] == figures["decoded_killed_starts"] == 1
