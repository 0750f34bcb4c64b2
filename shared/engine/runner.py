"""Runs one step: forward pass, logits of the rows that need them, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import build_batch, sampled_rows
from shared.ops.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.kv.layout import KVLayout
    from shared.model.llama import Llama
    from shared.ops.sampling import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult:
    """What a step produced."""

    token_ids: tuple[int | None, ...]
    """One a sequence, in the step's order: the sampled token, or None where none was asked for."""
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
        batch = build_batch(steps, self._layout, self._kv.device, all_outputs=with_logits)
        hidden = self._model.forward(batch, self._kv)
        logits = None
        if with_logits:
            logits = self._model.logits(hidden)
            hidden = hidden[list(sampled_rows(steps))]
        token_ids: list[int | None] = [None] * len(steps)
        wanted = [
            (index, step.sampling, step.context_len)
            for index, step in enumerate(steps)
            if step.sampling is not None
        ]
        if wanted:
            indices, sampling, positions = zip(*wanted, strict=True)
            chosen = self._choose(hidden, sampling, positions)
            for index, token_id in zip(indices, chosen.tolist(), strict=True):
                token_ids[index] = token_id
        return StepResult(token_ids=tuple(token_ids), logits=logits)

    def _choose(
        self, hidden: Tensor, sampling: Sequence[SamplingParams], positions: Sequence[int]
    ) -> Tensor:
        """Return [num_rows] int64, the next token behind each row of [num_rows, hidden_size]."""
        greedy = [row for row, how in enumerate(sampling) if how.is_greedy]
        drawn = [row for row, how in enumerate(sampling) if not how.is_greedy]
        chosen = torch.empty(len(sampling), dtype=torch.int64, device=hidden.device)
        if greedy:  # needs no logits, and takes the same way whatever else is in the batch
            chosen[greedy] = self._model.likeliest(hidden[greedy])
        if drawn:
            chosen[drawn] = sample(
                self._model.logits(hidden[drawn]),
                [sampling[row] for row in drawn],
                [positions[row] for row in drawn],
            )
        return chosen
