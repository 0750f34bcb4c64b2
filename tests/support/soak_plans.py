"""Random requests, and clients that behave at random: drawn from a seed, before anything runs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

from protocol.limits import MAX_SEED
from protocol.messages import LogitBias, Sampling

if TYPE_CHECKING:
    from protocol.exchange import Options

FIRST_ID, LAST_ID = 2, 257
"""The tiny model's tokens for single bytes; what lies below are control tokens."""

LONGEST_PROMPT_TOKENS = 200
LONGEST_ANSWER_TOKENS = 60

NUM_DOCUMENTS, NUM_CHAPTERS = 4, 7
CHAPTER_TOKENS = 32
"""Half of the prompts begin like one of a few documents, for some way.  The documents are the same
chapters in other orders, so that blocks of equal tokens have unequal ones before them."""


class Conduct(Enum):
    """What a client does with its answer."""

    READ = "reads it to its end"
    DAWDLE = "reads it to its end, slowly"
    CANCEL = "sends CANCEL, and reads on"
    CLOSE = "closes its connection"
    HALF_CLOSE = "closes the sending half"

    @property
    def leaves(self) -> bool:
        """Whether it wants no more of the answer at some moment."""
        return self not in (Conduct.READ, Conduct.DAWDLE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One request, and what its client will do.  Compared by identity."""

    id: str
    prompt: tuple[int, ...]
    options: Options
    """All but the id and `resume`."""
    conduct: Conduct = Conduct.READ
    leaves_after_s: float | None = None
    """When it leaves, counted from its request: most often before the first token."""
    leaves_after_tokens: int | None = None
    """Or behind so many tokens."""
    resumed_share: float | None = None
    """It comes with so large a share of the answer, as one whose answer broke off there."""

    @property
    def sampling(self) -> Sampling:
        """How its tokens are chosen."""
        return self.options["sampling"]


def draw_plans(seed: int, num_plans: int) -> list[Plan]:
    """Return the plans of a seed, in the order in which they are to begin."""
    chance = random.Random(seed)
    chapters = [_ids(chance, CHAPTER_TOKENS) for _ in range(NUM_CHAPTERS)]
    documents = [
        tuple(chain.from_iterable(chance.sample(chapters, NUM_CHAPTERS)))
        for _ in range(NUM_DOCUMENTS)
    ]
    return [_plan(chance, f"soak-{index}", documents) for index in range(num_plans)]


def _plan(chance: random.Random, name: str, documents: list[tuple[int, ...]]) -> Plan:
    conduct = chance.choices(list(Conduct), weights=[64, 6, 12, 12, 6])[0]
    is_impatient = conduct.leaves and chance.random() < 0.5
    max_tokens = _length(chance, LONGEST_ANSWER_TOKENS)
    return Plan(
        id=name,
        prompt=_prompt(chance, documents),
        options=_options(chance, max_tokens),
        conduct=conduct,
        # A third of them before the request can have been read.
        leaves_after_s=max(0.0, chance.uniform(-0.1, 0.2)) if is_impatient else None,
        leaves_after_tokens=(
            chance.randint(1, max_tokens) if conduct.leaves and not is_impatient else None
        ),
        resumed_share=chance.random() if chance.random() < 0.1 else None,
    )


def _prompt(chance: random.Random, documents: list[tuple[int, ...]]) -> tuple[int, ...]:
    num_tokens = _length(chance, LONGEST_PROMPT_TOKENS)
    if chance.random() < 0.5:
        return _ids(chance, num_tokens)
    common = chance.choice(documents)[: chance.randint(num_tokens // 2, num_tokens)]
    return (*common, *_ids(chance, num_tokens - len(common)))


def _length(chance: random.Random, longest: int) -> int:
    """Return a number of tokens: of every size, and often a very small one."""
    return chance.choice([chance.randint(1, longest), int(longest ** chance.random())])


def _options(chance: random.Random, max_tokens: int) -> Options:
    options: Options = {"max_tokens": max_tokens, "sampling": _sampling(chance)}
    if chance.random() < 0.2:
        options["min_tokens"] = chance.randint(0, max_tokens)
    if chance.random() < 0.3:
        options["ignore_eos"] = True
    if chance.random() < 0.3:  # of one character, and of two that lie in two tokens
        letters = chance.sample("abcdefghijklmnopqrstuvwxyz", 6)
        options["stop"] = [*letters[:4], letters[4] + letters[5]]
    if chance.random() < 0.3:
        options["stop_ids"] = list(_ids(chance, 4))
    if chance.random() < 0.2:
        options["stream"] = False
    if chance.random() < 0.2:
        options["logprobs"] = chance.choice([0, 1, 5])
    return options


def _sampling(chance: random.Random) -> Sampling:
    def maybe(share: float, value: float, otherwise: float) -> float:
        return value if chance.random() < share else otherwise

    biased = chance.sample(range(FIRST_ID, LAST_ID + 1), chance.choice([0, 0, 0, 1, 3]))
    return Sampling(
        temperature=maybe(0.7, chance.uniform(0.3, 3.0), 0.0),
        top_k=int(maybe(0.3, chance.randint(1, 100), 0)),
        top_p=maybe(0.3, chance.uniform(0.3, 1.0), 1.0),
        min_p=maybe(0.2, chance.uniform(0.0, 0.2), 0.0),
        seed=chance.randint(0, MAX_SEED),
        repetition_penalty=maybe(0.3, chance.uniform(0.8, 2.0), 1.0),
        presence_penalty=maybe(0.3, chance.uniform(-1.0, 4.0), 0.0),
        frequency_penalty=maybe(0.3, chance.uniform(-1.0, 2.0), 0.0),
        logit_bias=[
            LogitBias(id=token_id, bias=chance.uniform(-20.0, 10.0)) for token_id in biased
        ],
    )


def _ids(chance: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(chance.randint(FIRST_ID, LAST_ID) for _ in range(num_tokens))
