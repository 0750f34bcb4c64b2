"""Runs one step: forward pass, logits of the rows that need them, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import build_batch
from shared.engine.choosing import choose_tokens, is_plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.kv.layout import KVLayout
    from shared.model.llama import Llama
    from shared.ops.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step produced."""

    token_ids: tuple[int | None, ...]
    """One a sequence, in the step's order: the sampled token, or None where none was asked for."""
    logprobs: tuple[TokenLogprob | None, ...]
    """One a sequence: how likely its token was, where that was asked for."""
    logits: Tensor | None
    """[num_tokens, vocab_size] float32 of every token of the step, where they were asked for."""


class ModelRunner:
    """A model over one KV pool.  All calls come from the engine thread.

    Args:
        model: The model.
        kv: The pool's tensor, of `layout`'s shape.  Steps write the blocks that they name.
        layout: The pool's layout.

    Raises:
        ValueError: The pool and the model do not fit each other.
    """

    def __init__(self, model: Llama, kv: Tensor, layout: KVLayout) -> None:
        if tuple(kv.shape) != layout.shape:
            raise ValueError(f"the pool's shape is {tuple(kv.shape)}, its layout's {layout.shape}")
        spec = model.spec
        ours = (spec.num_layers, spec.num_kv_heads, spec.head_dim, model.dtype)
        theirs = (layout.num_layers, layout.num_kv_heads, layout.head_dim, kv.dtype)
        if ours != theirs:
            raise ValueError(
                f"a model of (layers, KV heads, head, type) {ours}; a pool of {theirs}"
            )
        self._model, self._kv, self._layout = model, kv, layout

    @torch.inference_mode()
    def execute(self, steps: Sequence[SequenceStep], *, with_logits: bool = False) -> StepResult:
        """Compute one step.

        When this returns, the keys and values of all its tokens are in the pool.

        Args:
            steps: The sequences, each at most once.
            with_logits: Whether to return every token's logits as well; for tests, since that is
                `vocab_size` floats a token.

        Raises:
            ValueError: A sequence does not fit the pool (see `build_batch`); nothing was written.
        """
        batch = build_batch(steps, self._layout, self._kv.device)
        hidden = self._model.forward(batch, self._kv)
        logits = self._model.logits(hidden) if with_logits else None
        token_ids: list[int | None] = [None] * len(steps)
        logprobs: list[TokenLogprob | None] = [None] * len(steps)
        wanted = [index for index, step in enumerate(steps) if step.sampling is not None]
        if wanted:
            ends = [batch.spans[i].query_start + batch.spans[i].query_len - 1 for i in wanted]
            chosen, likely = self._choose(hidden[ends], [steps[i] for i in wanted])
            for index, token_id, logprob in zip(wanted, chosen.tolist(), likely, strict=True):
                token_ids[index], logprobs[index] = token_id, logprob
        return StepResult(token_ids=tuple(token_ids), logprobs=tuple(logprobs), logits=logits)

    def _choose(
        self, hidden: Tensor, steps: Sequence[SequenceStep]
    ) -> tuple[Tensor, list[TokenLogprob | None]]:
        """Return the next token behind each row of [num_rows, hidden_size], [num_rows] int64."""
        chosen = torch.empty(len(steps), dtype=torch.int64, device=hidden.device)
        logprobs: list[TokenLogprob | None] = [None] * len(steps)
        plain = [row for row, step in enumerate(steps) if is_plain(step)]
        other = [row for row, step in enumerate(steps) if not is_plain(step)]
        if plain:  # needs no logits, and takes the same way whatever else is in the batch
            chosen[plain] = self._model.likeliest(hidden[plain])
        if other:
            logits = self._model.logits(hidden[other])
            sampled = choose_tokens(logits, [steps[row] for row in other])
            chosen[other] = sampled.token_ids
            for row, logprob in zip(other, sampled.logprobs, strict=True):
                logprobs[row] = logprob
        return chosen, logprobs
