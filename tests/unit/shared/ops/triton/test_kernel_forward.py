"""The GPU's forward pass, kernels and all, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from shared.ops.errors import ShapeError
from shared.ops.pool_pair import PoolPair
from shared.ops.triton.forward_ops import TritonOps
from tests.gpu.model_checks import FAMILIES, check_decode_follows_prefill, check_output_rows


@pytest.mark.parametrize("family", FAMILIES)
def test_decoded_tokens_equal_prefilled_ones(family: str) -> None:
    """Over both pools, with a padding row; with biases, norms of heads, a scaled rotation."""
    check_decode_follows_prefill(
        torch.float32, "cpu", TritonOps(torch.device("cpu")), family=family
    )


def test_a_sliding_window_is_refused_by_name() -> None:
    """Decoding without it would compute another model."""
    ops = TritonOps(torch.device("cpu"))
    ops.prepare_decode(max_batch=1, max_context_len=8, num_heads=2, num_kv_heads=1, head_dim=16)
    empty = torch.zeros(1)
    pools = PoolPair.of(torch.zeros(2, 1, 2, 1, 8, 16))
    with pytest.raises(ShapeError, match="a sliding window of 4 tokens needs another kernel"):
        ops.decode_step(
            empty, empty, empty, empty, pools, empty, empty, layer=0, scale=1.0, window=4
        )


def test_only_the_wanted_rows_leave_the_last_layer() -> None:
    """They are the same rows, and keys and values are written for all."""
    check_output_rows(torch.float32, "cpu", TritonOps(torch.device("cpu")))
