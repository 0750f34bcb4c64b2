"""One process that does both halves, prefill and decode: for tests, benchmarks and comparison.

The pair of daemons must answer as this does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from shared.engine.batch import SequenceStep
from shared.engine.history import TokenHistory
from shared.engine.runner import ModelRunner
from shared.kv.allocator import BlockAllocator
from shared.kv.cuda_pool import LocalCudaPool
from shared.kv.layout import DTypeName, KVLayout
from shared.kv.pool import LocalPool
from shared.ops.sampling import SamplingParams
from shared.ops.token_bitmap import pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.kv.pool import KVPool
    from shared.model.llama import Llama

GREEDY = SamplingParams()


@dataclass(slots=True, kw_only=True)
class _Request:
    index: int
    token_ids: list[int]
    """The prompt and what was sampled after it."""
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams
    history: TokenHistory | None
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def num_sampled_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def next_step(self, max_tokens: int) -> SequenceStep:
        """Return the next chunk of at most `max_tokens` tokens."""
        start = self.num_computed_tokens
        stop = min(len(self.token_ids), start + max_tokens)
        return SequenceStep(
            token_ids=self.token_ids[start:stop],
            start_position=start,
            block_table=self.block_table,
            sampling=self.sampling if stop == len(self.token_ids) else None,
            history=self.history,
        )


class LocalEngine:
    """Prefills in chunks and decodes in batches, over a pool of its own.

    Args:
        model: The model; the pool lies where its weights do.
        num_blocks: Blocks of the pool, the reserved one included.
        block_size: Tokens in a block.
        token_budget: Tokens that one step may compute.
        fill: What the pool holds at first; a test puts NaN there.

    Raises:
        ValueError: `token_budget` is below 1.
        LayoutError: The pool's shape is impossible.
        PoolAllocationError: There is no room for it.
    """

    def __init__(
        self,
        model: Llama,
        *,
        num_blocks: int,
        block_size: int = 16,
        token_budget: int = 512,
        fill: float | None = None,
    ) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}; it must be at least 1")
        self._eos_ids = frozenset(model.spec.eos_ids)
        self._vocab_size = model.spec.vocab_size
        self._layout = model.spec.kv_layout(
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=cast("DTypeName", str(model.dtype).removeprefix("torch.")),
        )
        self._pool = _new_pool(self._layout, model.device, fill)
        self._runner = ModelRunner(model, self._pool.kv, self._layout)
        self._allocator = BlockAllocator(num_blocks)
        self._token_budget = token_budget

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
        ignore_eos: bool = False,
    ) -> list[list[int]]:
        """Answer prompts together, as many at once as the pool holds.

        Args:
            prompts: Token ids; none is empty.
            max_tokens: Tokens to sample for each, at least 1.
            sampling: For all of them, or one for each.
            ignore_eos: Go on to `max_tokens` past the tokens that end an answer.

        Returns:
            The sampled ids of each prompt, in order; an answer's end token is among them.

        Raises:
            OutOfBlocksError: A prompt and its answer alone are larger than the pool.
            ValueError: A prompt is empty.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        waiting = deque(
            _Request(
                index=index,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_tokens=max_tokens,
                sampling=how,
                history=TokenHistory.needed_for(how, prompt=pack_tokens(prompt, self._vocab_size)),
            )
            for index, (prompt, how) in enumerate(zip(prompts, each, strict=True))
        )
        answers: list[list[int]] = [[] for _ in prompts]
        running: list[_Request] = []
        try:
            while waiting or running:
                self._admit(waiting, running)
                for request in self._step(running, ignore_eos=ignore_eos):
                    running.remove(request)
                    self._allocator.free(request.block_table)
                    answers[request.index] = request.token_ids[request.num_prompt_tokens :]
        finally:
            for request in running:
                self._allocator.free(request.block_table)
        return answers

    def prompt_logits(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after every token of a prompt: [num_tokens, vocab_size] float32.

        Raises:
            OutOfBlocksError: The prompt is larger than the pool.
        """
        blocks = self._allocator.allocate(self._layout.num_blocks_for(len(token_ids)))
        try:
            chunks: list[Tensor] = []
            for start in range(0, len(token_ids), self._token_budget):
                step = SequenceStep(
                    token_ids=token_ids[start : start + self._token_budget],
                    start_position=start,
                    block_table=blocks,
                    sampling=None,
                )
                logits = self._runner.execute([step], with_logits=True).logits
                assert logits is not None
                chunks.append(logits)
            return torch.cat(chunks)
        finally:
            self._allocator.free(blocks)

    def _admit(self, waiting: deque[_Request], running: list[_Request]) -> None:
        """Start requests in order while the pool holds a prompt and its whole answer.

        An empty pool that still is too small raises: nothing will ever be freed for the request.
        """
        while waiting:
            request = waiting[0]
            # The last token's keys and values are never needed, but a spare slot is simpler.
            num_blocks = self._layout.num_blocks_for(len(request.token_ids) + request.max_tokens)
            if running and num_blocks > self._allocator.num_free:
                return
            request.block_table = self._allocator.allocate(num_blocks)
            running.append(waiting.popleft())

    def _step(self, running: list[_Request], *, ignore_eos: bool) -> list[_Request]:
        """Compute one step within the token budget and return the requests that it finished."""
        budget = self._token_budget
        batch: list[tuple[_Request, SequenceStep]] = []
        # Decodes first: one token each, and they have waited for the prompt before.
        for request in sorted(running, key=lambda request: request.num_sampled_tokens == 0):
            if budget == 0:
                break
            step = request.next_step(budget)
            budget -= len(step.token_ids)
            batch.append((request, step))
        result = self._runner.execute([step for _, step in batch])
        finished: list[_Request] = []
        for (request, step), token_id in zip(batch, result.token_ids, strict=True):
            request.num_computed_tokens = step.context_len
            if token_id is None:
                continue
            request.token_ids.append(token_id)
            is_end = token_id in self._eos_ids and not ignore_eos
            if is_end or request.num_sampled_tokens == request.max_tokens:
                finished.append(request)
        return finished


def _new_pool(layout: KVLayout, device: torch.device, fill: float | None) -> KVPool:
    if device.type == "cpu":
        return LocalPool(layout, fill=fill)
    index = torch.cuda.current_device() if device.index is None else device.index
    return LocalCudaPool.create(layout, device=index, fill=fill)
