"""Short prefill steps on a GPU, captured once for each size: the host launches two graphs.

A prompt of 512 tokens is some 260 launches and 11 ms of computing; a slow host takes longer to
launch them than the GPU to run them.  What a step needs lies in buffers of fixed address and comes
in one transfer (`padded_steps.py`).  The first graph runs up to where all keys and values are in
the pool, the second makes the tokens, so that the event which decoded waits for comes between.

Tokens are the same as those of `ModelRunner` up to rounding: attention is summed in another order,
and cuBLAS may take another kernel for the padded number of rows.

Without a GPU the same steps run eagerly, which is how the tests on a CPU see them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from shared.engine.batch import pack_steps
from shared.engine.choosing import Chosen
from shared.engine.graph_head import GraphHead
from shared.engine.padded_steps import (
    MAX_SEQUENCES,
    Places,
    fill,
    is_short,
    num_entries_for,
    padded_batch,
    step_sizes,
)
from shared.model.llama import Begun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from shared.engine.batch import SequenceStep
    from shared.engine.device_stream import DeviceStream
    from shared.kv.layout import KVLayout
    from shared.model.llama import Llama

NUM_STAGINGS = 3
"""Host memory for uploads: of the step that runs, the one behind it, and the next.  An upload is
done before its step is, so no memory is written that is still to be read."""


class PrefillGraphs:
    """What computes short steps.

    Args:
        model: The model.
        kv: The pool's tensor.
        layout: Its layout.
        stream: Where steps are enqueued; at most two may be there that were not waited for.
        token_budget: Most tokens of any step.

    Takes its memory and captures its graphs at once, some seconds for a large model.
    """

    def __init__(
        self,
        model: Llama,
        kv: Tensor,
        layout: KVLayout,
        stream: DeviceStream,
        *,
        token_budget: int,
    ) -> None:
        self._model, self._kv, self._layout, self._stream = model, kv, layout, stream
        num_entries = num_entries_for(layout.block_size)
        self._places = [
            Places(size=size, num_entries=num_entries) for size in step_sizes(token_budget)
        ]
        longest = self._places[-1]
        self._run = torch.zeros(longest.num_numbers, dtype=torch.int64, device=model.device)
        self._stagings = [stream.host_tensor(longest.num_numbers) for _ in range(NUM_STAGINGS)]
        self._num_launched = 0
        spec = model.spec
        zeros = partial(torch.zeros, dtype=model.dtype, device=model.device)
        self._begun = Begun(
            query=zeros(MAX_SEQUENCES, spec.num_heads, spec.head_dim),
            residual=zeros(MAX_SEQUENCES, spec.hidden_size),
        )
        self._head = GraphHead(model, MAX_SEQUENCES)
        self._begin, self._finish = self._capture()

    def takes(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether there is a graph for a step."""
        return is_short(steps, max_tokens=self._places[-1].size)

    def begin(self, steps: Sequence[SequenceStep], on_written: Callable[[], None]) -> Chosen:
        """Enqueue one step; see `ModelRunner.begin`.  Its tokens are there until the next one.

        Args:
            steps: The sequences, each at most once; `takes` said yes to them.
            on_written: Called when everything that writes the pool is enqueued.

        Raises:
            ValueError: A sequence does not fit the pool; nothing was enqueued.
        """
        packed = pack_steps(steps, self._layout)
        num_tokens = packed.tokens.shape[1]
        places = next(each for each in self._places if each.size >= num_tokens)
        staging = self._stagings[self._num_launched % NUM_STAGINGS][: places.num_numbers]
        self._num_launched += 1
        fill(places, staging, packed)
        self._run[: places.num_numbers].copy_(staging, non_blocking=True)
        self._begin[places.size]()
        on_written()
        wanted = [step for step in steps if step.sampling is not None]
        if not wanted:
            return Chosen(self._head.sampled[:0], None)
        self._finish()
        told = self._head.choose(wanted, range(len(wanted)))
        return Chosen(self._head.sampled[: len(wanted)], told)

    # --- graphs ------------------------------------------------------------------------------

    def _capture(self) -> tuple[dict[int, Callable[[], None]], Callable[[], None]]:
        """Return for each size what begins a step of it, and what finishes a step of any."""
        begin: dict[int, Callable[[], None]] = {}
        self._stream.follow_all()
        with self._stream.current():
            # The largest first: the smaller ones then find its memory.
            for places in reversed(self._places):
                staging = self._stagings[0][: places.num_numbers]
                fill(places, staging, None)
                self._run[: places.num_numbers].copy_(staging)
                begin[places.size] = self._stream.capture(partial(self._begin_step, places))
            return begin, self._stream.capture(self._finish_step)

    def _begin_step(self, places: Places) -> None:
        begun = self._model.begin(padded_batch(places, self._run), self._kv)
        self._begun.query.copy_(begun.query)
        self._begun.residual.copy_(begun.residual)

    def _finish_step(self) -> None:
        batch = padded_batch(self._places[0], self._run)
        self._head.take_likeliest(self._model.finish(batch, self._begun, self._kv))
