"""When two greedy answers count as equal.

Two correct float32 implementations add in different orders, so their logits differ by some 1e-4.
Where the best two tokens of the reference lie closer together than `MIN_MARGIN`, either may win,
and from there on the answers are about different texts.  So: the ids must be equal up to the
first such position, and there the logits behind the same ids must be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.engine.history import TokenHistory, adjustments_of
from shared.ops.adjustments import adjust_logits
from shared.ops.philox import uniform
from shared.ops.sampling import candidates
from shared.ops.token_bitmap import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from shared.ops.sampling import SamplingParams

MIN_MARGIN = 1e-3
"""Below this lead of the best token over the second, either may be chosen."""

MAX_LOGIT_DIFFERENCE = 1e-3
"""What two float32 implementations may differ by; about 1e-4 is seen."""


def lead_of(
    token_id: int,
    *,
    over: int,
    prompt_ids: Sequence[int],
    answer_ids: Sequence[int],
    sampling: SamplingParams,
    logits_of: Callable[[list[int]], Tensor],
) -> float:
    """Return by how much one token's score lay above another's when one of them was chosen.

    Args:
        token_id: The one that was chosen.
        over: The one that somebody else chose.
        prompt_ids: What the answer answers.
        answer_ids: The answer before the choice.
        sampling: How tokens are chosen: bias, penalties and noise are part of the lead.  A token
            that temperature, top-k, top-p and min-p leave out is infinitely far behind.
        logits_of: Returns the logits after every token, [num_tokens, vocab_size].
    """
    scores = logits_of([*prompt_ids, *answer_ids])[-1].clone()
    vocab_size = scores.shape[0]
    history = TokenHistory.needed_for(
        sampling, prompt=pack_tokens(prompt_ids, vocab_size), answer_ids=answer_ids
    )
    if history is not None:
        adjust_logits(scores[None], adjustments_of([history], vocab_size, scores.device))
    if not sampling.is_greedy:
        ids, scaled = candidates(scores, sampling)
        position = len(prompt_ids) + len(answer_ids)
        noise = uniform(ids, position=position, seed=sampling.seed)
        scores = torch.full_like(scores, -math.inf)
        scores[ids] = scaled - torch.log(-torch.log(noise))
    return float(scores[token_id] - scores[over])


def check_repeated(
    ids: Sequence[int],
    solo: Sequence[int],
    *,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    logits_of: Callable[[list[int]], Tensor],
) -> None:
    """Fail unless an answer equals the one that the same request got when it ran alone.

    Args:
        ids: The answer under test.
        solo: The one that it got alone.
        prompt_ids: What both answer.
        sampling: How both were chosen.
        logits_of: As for `lead_of`; asked where the answers differ first.
    """
    assert len(ids) == len(solo)
    different = [index for index, token_id in enumerate(ids) if token_id != solo[index]]
    if not different:
        return
    num_equal = different[0]
    lead = lead_of(
        solo[num_equal],
        over=ids[num_equal],
        prompt_ids=prompt_ids,
        answer_ids=solo[:num_equal],
        sampling=sampling,
        logits_of=logits_of,
    )
    assert abs(lead) < MIN_MARGIN, f"token {num_equal} differs, and by {lead}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GreedyReference:
    """A prompt, the reference's greedy answer to it, and how sure each of its choices was.

    The reference is transformers, or where a GPU is tried, this project's one process on the CPU,
    which other tests hold to transformers.
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    num_certain: int
    """Choices before the first one whose margin is below `MIN_MARGIN`; all of them, if none is."""
    uncertain_logits: Tensor | None
    """[vocab_size], what that first one was chosen from."""

    @classmethod
    def compute(
        cls, model: LlamaForCausalLM, prompt_ids: Sequence[int], *, num_tokens: int
    ) -> GreedyReference:
        """Ask transformers' `generate` for `num_tokens` ids, whatever they are."""
        prompt = torch.tensor([list(prompt_ids)])
        with torch.inference_mode():
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        ids = output.sequences[0, len(prompt_ids) :].tolist()
        return cls.of_choices(prompt_ids, ids, torch.cat(output.logits))

    @classmethod
    def of_choices(
        cls, prompt_ids: Sequence[int], ids: Sequence[int], logits: Tensor
    ) -> GreedyReference:
        """Take an answer for the reference.

        Args:
            prompt_ids: What it answers.
            ids: The answer.
            logits: [num_tokens, vocab_size], what each of its tokens was chosen from.
        """
        best, second = logits.topk(2).values.unbind(-1)
        (uncertain,) = (best - second < MIN_MARGIN).nonzero(as_tuple=True)
        num_certain = int(uncertain[0]) if len(uncertain) else len(ids)
        return cls(
            prompt_ids=tuple(prompt_ids),
            ids=tuple(ids),
            num_certain=num_certain,
            uncertain_logits=logits[num_certain].clone() if len(uncertain) else None,
        )

    def check(self, ids: Sequence[int], logits_of: Callable[[list[int]], Tensor]) -> None:
        """Fail unless `ids` equals the reference by the rule above.

        Args:
            ids: The answer under test.
            logits_of: Returns the logits after every token, [num_tokens, vocab_size]; asked for
                the prompt and the certain ids where a choice was not certain.
        """
        assert len(ids) == len(self.ids)
        assert list(ids[: self.num_certain]) == list(self.ids[: self.num_certain])
        if self.uncertain_logits is not None:
            forced = [*self.prompt_ids, *self.ids[: self.num_certain]]
            difference = float((logits_of(forced)[-1] - self.uncertain_logits).abs().max())
            assert difference <= MAX_LOGIT_DIFFERENCE
