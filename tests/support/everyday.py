"""What people rely on every day, as checks of any pair: on a CPU, on one GPU, on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.client import Client
from protocol.messages import LogitBias, Sampling
from tests.support.pair import wait_until
from tests.support.soak_plans import Plan
from tests.support.solo import resume_of
from tests.support.stops import num_running, prompt_of
from tests.support.watched_streams import Ask, WatchedStreams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.exchange import Answer
    from protocol.messages import Resume
    from tests.support.pair import Pair
    from tests.support.solo import SoloEngine

MAX_TOKENS = 24
CLIENT_TIMEOUT_S = 60.0
BLOCK_SIZE = 16

_SAMPLINGS = (
    Sampling(seed=1, repetition_penalty=1.5),
    Sampling(seed=2, temperature=2.0, min_p=0.05, repetition_penalty=1.2),
    Sampling(seed=3, temperature=1.0, presence_penalty=2.0, frequency_penalty=0.5, top_p=0.95),
    Sampling(seed=4, temperature=3.0, top_k=30, logit_bias=[LogitBias(id=9, bias=4.0)]),
    Sampling(seed=5, temperature=4.0),
    Sampling(seed=6),
)

SAMPLING_PLANS = tuple(
    Plan(
        id=f"sampling-{number}",
        prompt=tuple(2 + (13 * number + 7 * place) % 250 for place in range(20 + 9 * number)),
        options={
            "max_tokens": MAX_TOKENS,
            "min_tokens": 20 * (number == 4),
            "sampling": sampling,
        },
    )
    for number, sampling in enumerate(_SAMPLINGS)
)
"""Every way to choose a token, each in some request."""


def ask_plan(pair: Pair, plan: Plan, *, resume: Resume | None = None) -> Answer:
    """Carry a plan out as a client that reads its answer to the end."""
    client = Client(pair.socket, timeout_s=CLIENT_TIMEOUT_S)
    return client.generate(plan.prompt, resume=resume, **plan.options)


def check_sampling(pair: Pair, engine: SoloEngine) -> None:
    """Fail unless sampled answers are one process's: alone, in a batch, and resumed on the way."""
    whole = [(plan, engine.answer(plan), None) for plan in SAMPLING_PLANS]
    fingerprint = str(pair.status()["fingerprint"])
    resumed = []
    for share in (0.0, 0.1, 0.5):  # behind nothing, behind the first tokens, in the middle
        for plan in SAMPLING_PLANS:
            rest = replace(plan, resumed_share=share)
            solo = engine.answer(rest)
            resumed.append((rest, solo, resume_of(rest, solo, fingerprint=fingerprint)))
    alone = [ask_plan(pair, plan, resume=resume) for plan, _, resume in (*whole, *resumed)]
    with ThreadPoolExecutor(len(whole)) as users:
        together = list(users.map(lambda case: ask_plan(pair, case[0]), whole))
    for (plan, solo, _), answer in zip(
        (*whole, *resumed, *whole), (*alone, *together), strict=True
    ):
        engine.check_ids(plan, solo, answer.ids, is_whole=True)


def check_second_turn(pair: Pair, engine: SoloEngine) -> None:
    """Fail unless a second turn finds the first one's blocks, and is answered as without them."""
    document = prompt_of(500, salt=77)
    first = Ask(prompt=document, max_tokens=MAX_TOKENS)
    with WatchedStreams(pair.socket, [first]) as streams:
        (told,) = streams.results()
    second = Ask(prompt=(*document, *told.ids, *prompt_of(20, salt=78)), max_tokens=MAX_TOKENS)
    with WatchedStreams(pair.socket, [second]) as streams:
        results = streams.results()
    engine.check_delivered([first, second], [told, *results])
    assert results[0].end is not None
    assert results[0].end.usage.cached_tokens >= len(document) // BLOCK_SIZE * BLOCK_SIZE


def check_death_of_decoded(pair: Pair, engine: SoloEngine, asks: Sequence[Ask]) -> None:
    """Kill decoded under streams; fail unless each goes on in its successor as if undisturbed."""
    with WatchedStreams(pair.socket, asks) as streams:
        streams.wait_for_tokens(sum(ask.max_tokens for ask in asks) // 4)
        pair.kill("decoded")
        pair.start("decoded")
        results = streams.results()
    engine.check_delivered(asks, results)
    assert any(delivered.losses for delivered in results), "decoded died too late"
    pair.wait_serving()
    pair.wait_settled()


def check_death_of_prefilld(pair: Pair, engine: SoloEngine, asks: Sequence[Ask]) -> None:
    """Kill prefilld under streams; fail unless they go on, and its successor serves beside them.

    What decoded has pulled it keeps; what it reads in place it moves to blocks of its own.
    """
    epoch = pair.status()["epoch"]
    with WatchedStreams(pair.socket, asks) as streams:
        wait_until(lambda: num_running(pair) == len(asks), what="streams run")
        pair.kill("prefilld")
        pair.restart("prefilld")
        late = Ask(prompt=prompt_of(40, salt=79), max_tokens=MAX_TOKENS)
        with WatchedStreams(pair.socket, [late]) as beside:
            engine.check_delivered([late], beside.results())
        results = streams.results()
    engine.check_delivered(asks, results)
    assert not any(delivered.losses for delivered in results)
    assert pair.status()["epoch"] != epoch
    pair.wait_settled()
