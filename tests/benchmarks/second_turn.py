"""A conversation over a long document: how long its second turn waits, against its first.

The document is a meeting of QMSum, the questions are two of its own.  Both turns go through a real
pair; the second one brings the document, the first question and its answer along, as chats do.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from protocol.messages import ChatMessage
from tests.support.pair import Pair

REPOSITORY = Path(__file__).parents[2]
DOCUMENTS = "longdoc_qmsum_ami_6.jsonl"
"""Six meetings, a line each; the first is the shortest, some 4,000 tokens."""

NUM_ANSWER_TOKENS = 48
POOL_BLOCKS = 512
"""As many tokens as the embedded model can look back on, 8,192."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondTurn:
    """Two turns, as the client saw them."""

    prompt_tokens: tuple[int, int]
    cached_tokens: tuple[int, int]
    ttft_ms: tuple[float, float]

    @property
    def ratio(self) -> float:
        """Wait for the second turn's first token, as a share of the first turn's."""
        return self.ttft_ms[1] / self.ttft_ms[0]


def meeting() -> tuple[str, list[str]] | None:
    """Return the first meeting's transcript and its questions; None where it is not at hand.

    It is looked for in the folder that KVPAIR_TRACES names, or in `../shared/traces` beside the
    repository.
    """
    folder = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))
    if not (folder / DOCUMENTS).is_file():
        return None
    with (folder / DOCUMENTS).open(encoding="utf-8") as lines:
        told = json.loads(next(lines))
    said = [f"{turn['speaker']}: {turn['content']}" for turn in told["meeting_transcripts"]]
    asked = told["general_query_list"] + told["specific_query_list"]
    return "\n".join(said), [each["query"] for each in asked]


def converse(model_file: Path, transcript: str, questions: list[str]) -> SecondTurn:
    """Ask two questions about a transcript in one conversation."""
    settings = {"pool.num_blocks": POOL_BLOCKS, "decoded.num_blocks": POOL_BLOCKS}
    with (
        tempfile.TemporaryDirectory() as folder,
        Pair(Path(folder), model=model_file, settings=settings) as pair,
    ):
        chat = [ChatMessage(role="user", content=f"{transcript}\n\n{questions[0]}")]
        first = pair.client.generate(chat, max_tokens=NUM_ANSWER_TOKENS)
        chat += [
            ChatMessage(role="assistant", content=first.text),
            ChatMessage(role="user", content=questions[1]),
        ]
        second = pair.client.generate(chat, max_tokens=NUM_ANSWER_TOKENS)
    return SecondTurn(
        prompt_tokens=(first.usage.prompt_tokens, second.usage.prompt_tokens),
        cached_tokens=(first.usage.cached_tokens, second.usage.cached_tokens),
        ttft_ms=(first.ttft_ms or 0.0, second.ttft_ms or 0.0),
    )
