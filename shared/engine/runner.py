"""Runs one step: forward pass, logits of the rows that need them, sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import build_batch, sampled_rows
from shared.engine.choosing import Chosen, choose_tokens, is_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.kv.layout import KVLayout
    from shared.model.batch import ForwardBatch
    from shared.model.llama import Llama


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
        self._peer: Tensor | None = None

    def set_peer(self, kv: Tensor | None) -> None:
        """Let block tables name blocks of a peer's pool, or of none any more."""
        self._peer = kv

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
        logits: Tensor | None = None
        if with_logits:
            batch = self._batch_of(steps, all_outputs=True)
            hidden = self._model.forward(batch, self._kv)
            logits = self._model.logits(hidden)
            chosen = self._choose(hidden[list(sampled_rows(steps))], steps)
        else:
            chosen = self.begin(steps)
        if chosen.told is not None:
            chosen.told.settle()
        return StepResult(token_ids=self.token_ids(steps, chosen.token_ids), logits=logits)

    def begin(
        self, steps: Sequence[SequenceStep], on_written: Callable[[], None] = lambda: None
    ) -> Chosen:
        """Enqueue one step on the current stream; on a CPU it is computed when this returns.

        Args:
            steps: The sequences, each at most once.
            on_written: Called when everything that writes the pool is enqueued.

        Returns:
            [num_sampled] int64 on the model's device, for `token_ids` once it is computed, and
            what is to be settled then.

        Raises:
            ValueError: As `execute`.
        """
        batch = self._batch_of(steps)
        begun = self._model.begin(batch, self._kv)
        on_written()
        return self._choose(self._model.finish(batch, begun, self._kv), steps)

    @staticmethod
    def token_ids(steps: Sequence[SequenceStep], sampled: Tensor) -> tuple[int | None, ...]:
        """Return one a sequence, in order: what was sampled for it, or None where nothing was."""
        chosen = iter(sampled.tolist())
        return tuple(None if step.sampling is None else next(chosen) for step in steps)

    def _batch_of(
        self, steps: Sequence[SequenceStep], *, all_outputs: bool = False
    ) -> ForwardBatch:
        return build_batch(
            steps,
            self._layout,
            self._kv.device,
            all_outputs=all_outputs,
            window=self._model.spec.sliding_window,
            peer=self._peer,
        )

    def _choose(self, hidden: Tensor, steps: Sequence[SequenceStep]) -> Chosen:
        """Choose a token behind each row that a step wants one of."""
        wanted = [step for step in steps if step.sampling is not None]
        if not wanted:
            return Chosen(torch.empty(0, dtype=torch.int64, device=hidden.device), None)
        plain = [row for row, step in enumerate(wanted) if is_plain(step)]
        if len(plain) == len(wanted):
            return Chosen(self._model.likeliest(hidden), None)
        other = [row for row, step in enumerate(wanted) if not is_plain(step)]
        if not plain:
            return choose_tokens(self._model.logits(hidden), wanted)
        token_ids = torch.empty(len(wanted), dtype=torch.int64, device=hidden.device)
        # It needs no logits, and takes the same way whatever else is in the batch.
        token_ids[plain] = self._model.likeliest(hidden[plain])
        chosen = choose_tokens(self._model.logits(hidden[other]), [wanted[row] for row in other])
        token_ids[other] = chosen.token_ids
        return Chosen(token_ids, chosen.told)
