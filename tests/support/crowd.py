"""Requests whose answers do not fit a small pool together, and what each one is answered alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import Sampling
from shared.daemon.sampling import sampling_params
from shared.engine.local import LocalEngine
from shared.ops.sampling import SamplingParams
from tests.support.margin_rule import check_repeated
from tests.support.watched_streams import Ask

if TYPE_CHECKING:
    from shared.model.llama import Llama
    from tests.support.watched_streams import Delivered

NUM_BLOCKS = 40
"""Of decoded's pool, so that three answers of the crowd fit it."""
NUM_TOKENS = 150
"""Of each answer: about twelve blocks of 16 with its prompt."""


def crowd(num_asks: int = 12, *, is_greedy: bool = False) -> list[Ask]:
    """Return short and longer prompts; every second one is drawn by chance from a seed."""
    return [
        Ask(
            prompt=tuple(2 + (7 * index + 11 * number) % 250 for index in range(10 + 9 * number)),
            max_tokens=NUM_TOKENS,
            sampling=Sampling(
                temperature=0.0 if is_greedy else 1.5 * (number % 2),
                seed=number,
                repetition_penalty=1.3 if not is_greedy and number > 8 else 1.0,
            ),
        )
        for number in range(num_asks)
    ]


class Alone:
    """One engine on the CPU that answers one request after the other.

    Args:
        model: The model in float32, as the daemons serve it.
    """

    def __init__(self, model: Llama) -> None:
        self._engine = LocalEngine(model, num_blocks=64)
        self._known: dict[Ask, list[int]] = {}

    def answer(self, ask: Ask) -> list[int]:
        """Return what a request is answered; computed when it is first asked for."""
        if ask not in self._known:
            (self._known[ask],) = self._engine.generate(
                [ask.prompt],
                max_tokens=ask.max_tokens,
                sampling=sampling_params(ask.sampling),
                ignore_eos=True,
            )
        return self._known[ask]

    def check(self, delivered: Delivered, ask: Ask) -> None:
        """Fail unless an answer is that one, but for ties that rounding decides.

        To be used where it was computed in another order: by a GPU, or resumed.  Not for requests
        with penalties, of whose ties nothing is known.
        """
        check_repeated(
            delivered.ids,
            self.answer(ask),
            prompt_ids=ask.prompt,
            sampling=SamplingParams(
                temperature=ask.sampling.temperature, seed=ask.sampling.seed or 0
            ),
            logits_of=self._engine.prompt_logits,
        )
