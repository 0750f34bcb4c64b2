"""What one process answers to a request alone: what the pair's answer to it must be.

One process and the pair run the same float32 kernels and the same noise, but not in the same
batches, and a product over more rows adds in another order.  So answers are held equal id by id;
where they first differ, the choice must have been a close one (`margin_rule`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from protocol.messages import Resume
from shared.daemon.sampling import sampling_params
from shared.engine.local import LocalEngine
from shared.model.answer import AnswerAssembler
from tests.support.margin_rule import MAX_LOGIT_DIFFERENCE, MIN_MARGIN, lead_of
from tests.support.soak_plans import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.exchange import Options
    from protocol.messages import TokenLogprob
    from shared.daemon.model_host import ModelHost
    from shared.ops.sampling import SamplingParams
    from tests.support.watched_streams import Ask, Delivered

NUM_BLOCKS = 256
"""4,096 tokens: the test models' whole context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solo:
    """One request's answer from one process."""

    ids: tuple[int, ...]
    """Without those that the request brings."""
    text: str
    reason: str
    brought_ids: tuple[int, ...]
    """Those that it brings: the beginning of the answer, where it goes on with one."""


def plan_of(ask: Ask) -> Plan:
    """Return the same request as a plan: it is read to its end."""
    options: Options = {
        "max_tokens": ask.max_tokens,
        "sampling": ask.sampling,
        "ignore_eos": True,
    }
    return Plan(id=f"{ask.prompt[:4]}…", prompt=ask.prompt, options=options)


def resume_of(plan: Plan, solo: Solo, *, fingerprint: str) -> Resume | None:
    """Return what a client brings that goes on with an answer; None for one from the start.

    Args:
        plan: The request.
        solo: Its answer.
        fingerprint: Of the pair's model.
    """
    if plan.resumed_share is None:
        return None
    seed = plan.sampling.seed
    assert seed is not None
    return Resume(attempt=1, seed=seed, fingerprint=fingerprint, ids=[*solo.brought_ids])


class SoloEngine:
    """Answers requests one by one, and judges others' answers by its own.

    Args:
        host: The model that the pair serves, in this process.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._engine = LocalEngine(host.model, num_blocks=NUM_BLOCKS)
        self._known: dict[Ask, Solo] = {}

    def answer(self, plan: Plan) -> Solo:
        """Return a request's answer, from where it is to be resumed."""
        options = plan.options
        (sampled,) = self._engine.generate(
            [plan.prompt],
            max_tokens=options["max_tokens"] or 1,
            sampling=self._params(plan),
            ignore_eos=True,
        )
        brought = tuple(sampled[: self._resumes_behind(plan, sampled)])
        piece = self._assembler(plan).replay(sampled, num_delivered=len(brought))
        assert piece.finish is not None
        return Solo(
            ids=tuple(piece.ids),
            text=piece.text,
            reason=piece.finish,
            brought_ids=brought,
        )

    def check_delivered(self, asks: Sequence[Ask], results: Sequence[Delivered]) -> None:
        """Fail unless answers are whole, and those of one process."""
        for ask, delivered in zip(asks, results, strict=True):
            plan = plan_of(ask)
            if ask not in self._known:
                self._known[ask] = self.answer(plan)
            solo, end = self._known[ask], delivered.end
            assert end is not None
            assert (end.reason, end.usage.completion_tokens) == ("length", ask.max_tokens)
            if self.check_ids(plan, solo, delivered.ids, is_whole=True):
                assert delivered.text == solo.text

    def check_ids(self, plan: Plan, solo: Solo, ids: Sequence[int], *, is_whole: bool) -> bool:
        """Fail unless ids are those of one process, or differ from them by a close choice.

        Args:
            plan: What was asked.
            solo: Its answer.
            ids: The ones to judge.
            is_whole: Whether they end the answer, or may be its beginning.

        Returns:
            Whether they are equal.
        """
        pairs = enumerate(zip(ids, solo.ids, strict=False))
        num_equal = next((place for place, (one, other) in pairs if one != other), None)
        if num_equal is None:
            assert len(ids) <= len(solo.ids), f"{plan.id}: {len(ids)} ids, not {len(solo.ids)}"
            assert len(ids) == len(solo.ids) or not is_whole, f"{plan.id}: it stops too soon"
            return True
        told = [*solo.brought_ids, *solo.ids[:num_equal]]
        lead = lead_of(
            solo.ids[num_equal],
            over=ids[num_equal],
            prompt_ids=plan.prompt,
            answer_ids=told,
            sampling=self._params(plan),
            logits_of=self._engine.prompt_logits,
        )
        assert abs(lead) < MIN_MARGIN, f"{plan.id}: token {len(told)} differs, and by {lead}"
        return False

    def check_logprobs(
        self, plan: Plan, solo: Solo, ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> None:
        """Fail unless probabilities are the model's own, as many as there are ids."""
        num_top = plan.options.get("logprobs")
        if num_top is None:
            assert not logprobs, plan.id
            return
        assert len(logprobs) == len(ids), plan.id
        if not ids:
            return
        behind = [*plan.prompt, *solo.brought_ids, *ids[:-1]]
        own = self._engine.prompt_logits(behind)[-len(ids) :].log_softmax(-1)
        for row, token_id, told in zip(own, ids, logprobs, strict=True):
            assert len(told.top_ids) == len(told.top_logprobs) == num_top, plan.id
            expected = torch.cat([row[token_id].view(1), row.topk(num_top).values])
            torch.testing.assert_close(
                torch.tensor([told.logprob, *told.top_logprobs]),
                expected,
                rtol=0,
                atol=MAX_LOGIT_DIFFERENCE,
            )

    def _resumes_behind(self, plan: Plan, sampled: Sequence[int]) -> int:
        """Return behind how many tokens the request goes on: a place where a client can be."""
        if plan.resumed_share is None:
            return 0
        assembler, places = self._assembler(plan), [0]
        for token_id in sampled:
            piece = assembler.push(token_id)
            if piece.ids:
                places.append(piece.index + len(piece.ids))
            if piece.finish is not None:
                break
        return places[int(plan.resumed_share * len(places))]

    def _end_ids(self, plan: Plan) -> list[int]:
        eos_ids = () if plan.options.get("ignore_eos", False) else self._host.spec.eos_ids
        return sorted({*plan.options.get("stop_ids", ()), *eos_ids})

    def _params(self, plan: Plan) -> SamplingParams:
        return sampling_params(
            plan.sampling,
            min_tokens=plan.options.get("min_tokens", 0),
            end_ids=self._end_ids(plan),
        )

    def _assembler(self, plan: Plan) -> AnswerAssembler:
        return AnswerAssembler(
            self._host.tokenizer.token_bytes,
            max_tokens=plan.options["max_tokens"] or 1,
            min_tokens=plan.options.get("min_tokens", 0),
            stop_ids=frozenset(self._end_ids(plan)),
            stop_strings=plan.options.get("stop", ()),
        )
