"""How much memory computing needs beside weights and pool."""

from __future__ import annotations

from shared.engine.workspace import decode_workspace_bytes, prefill_workspace_bytes
from shared.kv.layout import DTypeName, KVLayout
from shared.model.random_model import find_shape

SPEC = find_shape("random:llama-3.1-8b")


def layout(dtype: DTypeName) -> KVLayout:
    return KVLayout(
        num_blocks=2, num_layers=32, num_kv_heads=8, block_size=16, head_dim=128, dtype=dtype
    )


def test_a_large_model_needs_little_beside_its_weights() -> None:
    """16 GB of them; a bound that took as much again would waste the GPU."""
    assert 1.0e9 < prefill_workspace_bytes(SPEC, layout("bfloat16"), token_budget=2048) < 2e9
    assert 0.5e9 < decode_workspace_bytes(SPEC, layout("bfloat16"), max_batch=128) < 1e9


def test_room_grows_with_what_a_step_may_have() -> None:
    """Tokens, rows and wider numbers; captured steps end at some size, plain ones do not."""
    budgets = [64, 1024, 2048, 4096]
    needed = [
        prefill_workspace_bytes(SPEC, layout("bfloat16"), token_budget=each) for each in budgets
    ]
    assert needed == sorted(needed)
    assert 2 * (needed[2] - needed[1]) == needed[3] - needed[2]
    wide = prefill_workspace_bytes(SPEC, layout("float32"), token_budget=2048)
    assert needed[2] < wide < 2 * needed[2]
    few, many = (
        decode_workspace_bytes(SPEC, layout("bfloat16"), max_batch=each) for each in (8, 256)
    )
    assert few < many
