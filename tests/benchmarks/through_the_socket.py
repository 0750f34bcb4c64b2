"""The pair against transformers' `generate`, through the socket, with the stages beside it."""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.benchmarks.decode_vs_transformers import NUM_NEW_TOKENS, prepare
from tests.support.pair import Pair

if TYPE_CHECKING:
    from protocol.client import Answer
    from tests.benchmarks.interleaved import Interleaved

STAGES = ("ready", "adopted", "copy_start", "copy_done", "first_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketResult:
    """The race, and where the pair's answers spent their time."""

    race: Interleaved
    ttft_ms: float
    """Median, at the client."""
    stages_ms: dict[str, float]
    """Medians, since prefilld knew the first token."""


def against_pair(model_file: Path, *, num_threads: int) -> SocketResult:
    """Time the pair and transformers by turns, each with `num_threads` threads.

    prefilld is idle while decoded decodes, so the machine's cores are decoded's.
    """
    contest, _ = prepare(model_file, num_threads=num_threads)
    settings = {
        "prefilld.threads": num_threads,
        "decoded.threads": num_threads,
        "pool.prefix_cache": False,  # one prompt again and again, which transformers computes anew
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        Pair(Path(folder), model=model_file, settings=settings) as pair,
    ):
        answers: list[Answer] = []

        def ask() -> list[int]:
            answer = pair.client.generate(
                contest.prompt_ids, max_tokens=NUM_NEW_TOKENS, ignore_eos=True
            )
            answers.append(answer)
            return list(answer.ids)

        race = contest.against(ask)
    return SocketResult(
        race=race,
        ttft_ms=statistics.median(answer.ttft_ms or 0.0 for answer in answers),
        stages_ms=_medians(answers),
    )


def _medians(answers: list[Answer]) -> dict[str, float]:
    stages = [
        msgspec.structs.asdict(answer.timings_ms.handoff)
        for answer in answers
        if answer.timings_ms.handoff is not None
    ]
    return {name: statistics.median(stage[name] for stage in stages) for name in STAGES}
