"""How much of a GPU's memory an engine needs beside weights and pool: known before either graph.

A pool is sized first, since a captured graph holds the addresses of its blocks; what is captured
afterwards must still fit.  So this is an upper bound from the shape of the model, not a reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.engine.padded_steps import MAX_TOKENS

if TYPE_CHECKING:
    from shared.kv.layout import KVLayout
    from shared.model.spec import ModelSpec

FIXED_BYTES = 256 << 20
"""What torch, cuBLAS and cuDNN keep for themselves, and the graphs: some hundred kernels each."""

LOGIT_COPIES = 6
"""Of float32 logits: as they are, adjusted, sorted, and what sorting needs."""

MAX_SAMPLED = 64
"""Prompts of one step that are sampled from, in all likelihood: each is a row of logits."""


def prefill_workspace_bytes(spec: ModelSpec, layout: KVLayout, *, token_budget: int) -> int:
    """Return the most bytes that prefill steps need.

    Args:
        spec: The model.
        layout: The pool's, of which only the type of the numbers matters.
        token_budget: Most tokens of a step.
    """
    # Captured steps keep memory of their own.
    num_tokens = token_budget + min(token_budget, MAX_TOKENS)
    context_bytes = spec.max_context_tokens * layout.token_bytes // layout.num_layers
    return context_bytes + _step_bytes(
        spec, layout, num_tokens=num_tokens, num_sampled=min(token_budget, MAX_SAMPLED)
    )


def decode_workspace_bytes(spec: ModelSpec, layout: KVLayout, *, max_batch: int) -> int:
    """Return the most bytes that decode steps need.

    Args:
        spec: The model.
        layout: The pool's, of which only the type of the numbers and the block size matter.
        max_batch: Most sequences of a step.
    """
    table_bytes = 4 * max_batch * layout.num_blocks_for(spec.max_context_tokens)
    return table_bytes + _step_bytes(spec, layout, num_tokens=max_batch, num_sampled=max_batch)


def _step_bytes(spec: ModelSpec, layout: KVLayout, *, num_tokens: int, num_sampled: int) -> int:
    """Return what a step of so many rows needs, were nothing of a layer freed before its end."""
    heads_width = (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    row_width = 4 * spec.hidden_size + 2 * heads_width + 3 * spec.intermediate_size
    logit_bytes = 4 * LOGIT_COPIES * num_sampled * spec.vocab_size
    return FIXED_BYTES + num_tokens * row_width * layout.item_bytes + logit_bytes
