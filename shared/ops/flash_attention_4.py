"""FlashAttention 4, where the package `flash-attn-4` is installed: the border to that library.

Its kernels are written in Python and compiled when they are first called: some seconds for a type
and a head size, nothing for a length.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shared.ops.attention_choice import AttentionUnavailableError, told

if TYPE_CHECKING:
    from torch import Tensor

    from shared.ops.attention_choice import GatheredAttention

NAME = "flash-attn-4"
MODULE = "flash_attn.cute.interface"


def load_flash_attention_4() -> GatheredAttention:
    """Import the library and return its attention over a gathered context.

    Raises:
        AttentionUnavailableError: It is not installed, or does not fit what is.
    """
    try:
        function: Any = importlib.import_module(MODULE).flash_attn_func
    except ModuleNotFoundError as error:
        raise AttentionUnavailableError(_missing(error)) from error
    except Exception as error:  # of its own imports: another version of CUDA, of torch, of itself
        raise AttentionUnavailableError(f"{NAME} cannot be imported: {told(error)}") from error

    def attend(query: Tensor, context: Tensor, scale: float) -> Tensor:
        key, value = context.unsqueeze(1)
        # Its causal mask ends with the last query and the last key.
        out: Tensor = function(query.unsqueeze(0), key, value, softmax_scale=scale, causal=True)[0]
        return out.squeeze(0)

    return attend


def _missing(error: ModuleNotFoundError) -> str:
    package = MODULE.partition(".")[0]
    if error.name is not None and error.name.partition(".")[0] == package:
        return f"{NAME} is not installed"
    return f"{NAME} is not installed whole: {error.name} is missing"
