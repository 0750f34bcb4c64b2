"""The end of a captured step: the likeliest token of every row, and other choices in its place.

A CUDA graph takes the likeliest token of each row, in memory of fixed address.  Rows that want
another choice get it behind the replay, from the logits that the graph left; that is enqueued as
well, and nobody waits for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from shared.engine.choosing import choose_tokens, is_plain
from shared.ops.transfer import to_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from shared.engine.choosing import Choice, Told
    from shared.model.llama import Llama


class GraphHead:
    """The tokens of one step.

    Args:
        model: The model.
        max_rows: Most rows of a step.
    """

    def __init__(self, model: Llama, max_rows: int) -> None:
        self._model = model
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=model.device)
        """[max_rows], the tokens of the last step that was enqueued."""
        self._logits = torch.zeros((max_rows, model.spec.vocab_size), device=model.device)
        """The last step's, unless the likeliest tokens were found without them."""
        self._hidden: Tensor | None = None
        """What they are computed from in that case."""

    def take_likeliest(self, hidden: Tensor) -> None:
        """Leave the likeliest token of each row in `sampled`; a graph may capture this.

        Args:
            hidden: [num_rows, hidden_size], what the model returned.
        """
        num_rows = hidden.shape[0]
        self.sampled[:num_rows], logits = self._model.likeliest_with_logits(hidden)
        if logits is None:
            self._hidden = hidden
        else:
            self._logits[:num_rows] = logits

    def choose(self, choices: Sequence[Choice], rows: Sequence[int]) -> Told | None:
        """Replace the tokens of rows that want another choice, behind the step.

        Args:
            choices: What is wanted.
            rows: The row of each.

        Returns:
            What is to be fetched and settled; None where nobody asked.
        """
        others = [
            (choice, row) for choice, row in zip(choices, rows, strict=True) if not is_plain(choice)
        ]
        if not others:
            return None
        where = to_device(np.array([row for _, row in others]), self._model.device)
        if self._hidden is None:
            logits = self._logits.index_select(0, where)
        else:
            logits = self._model.logits(self._hidden.index_select(0, where))
        chosen = choose_tokens(logits, [choice for choice, _ in others])
        self.sampled.index_copy_(0, where, chosen.token_ids)
        return chosen.told
