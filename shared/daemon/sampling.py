"""Between the wire's words for sampling and the engine's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.messages import TokenLogprob as WireLogprob
from shared.ops.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.messages import Sampling
    from shared.ops.logprobs import TokenLogprob


def sampling_params(
    sampling: Sampling, *, min_tokens: int = 0, end_ids: Sequence[int] = ()
) -> SamplingParams:
    """Return the engine's form of the wire's sampling fields.

    Args:
        sampling: With its seed resolved.
        min_tokens: Tokens that the answer has before one of `end_ids` may be sampled.
        end_ids: Tokens that end the answer.

    Raises:
        ValueError: The seed is not resolved.
    """
    if sampling.seed is None:
        raise ValueError("the seed was not resolved; prefilld draws one before anything is sampled")
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple((entry.id, entry.bias) for entry in sampling.logit_bias),
        min_tokens=min_tokens,
        end_ids=tuple(end_ids),
    )


def wire_logprob(logprob: TokenLogprob) -> WireLogprob:
    """Return the wire's form of what the engine tells about a token's probability."""
    return WireLogprob(
        logprob=logprob.logprob,
        top_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )
