"""Questions for tests that compare answers: the first turns of MT-Bench where they are at hand."""

from __future__ import annotations

import json
import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

OWN_QUESTIONS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a river that forgets its way.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel?",
    "List five uses for an empty jam jar.",
    "Translate 'good morning, my friend' into Spanish and German.",
    "Write a Python function that reverses the words of a sentence.",
    "Who wrote Faust, and what is it about?",
    "Give me a recipe for pancakes for two people.",
    "What is 17 times 23? Show each step.",
    "Describe the taste of a lemon to somebody who never had one.",
    "Why do we have leap years?",
    "Write a polite letter that cancels a hotel booking.",
    "Name three rivers in Africa and the seas they reach.",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "How does a bicycle stay upright?",
    "Sort these words by length: pear, fig, banana, apple.",
    "What should a beginner know before buying a piano?",
    "Write SQL that counts the orders of each customer.",
    "Is a tomato a fruit? Give both answers and their reasons.",
)


def first_questions(number: int) -> tuple[str, list[str]]:
    """Return where the questions come from, and at most `number` of them.

    They are read from `mt_bench_80.jsonl` in the folder that KVPAIR_TRACES names, or in
    `../shared/traces` beside the repository; without either, those above serve.
    """
    folder = Path(os.environ.get("KVPAIR_TRACES", REPOSITORY.parent / "shared" / "traces"))
    path = folder / "mt_bench_80.jsonl"
    if not path.is_file():
        return "the tests' own questions, MT-Bench not being at hand", list(OWN_QUESTIONS[:number])
    lines = path.read_text(encoding="utf-8").splitlines()[:number]
    return str(path), [json.loads(line)["turns"][0] for line in lines]
