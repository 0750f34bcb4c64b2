"""What each kernel must show, on whatever runs it: a GPU, or Triton's interpreter on a CPU.

Every check draws fresh numbers, fills what must not be read with NaN, and compares by the relative
error of the whole result against float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.ops.activation import silu_mul as silu_mul_reference
from shared.ops.context import gather_context as gather_context_reference
from shared.ops.context import join_attention as join_attention_reference
from shared.ops.decode_step import decode_step
from shared.ops.gather_blocks import gather_blocks as gather_blocks_reference
from shared.ops.kv_write import PAD_SLOT
from shared.ops.norm import add_rms_norm as add_rms_norm_reference
from shared.ops.pool_pair import PoolPair, peer_entries
from shared.ops.rope_kv_write import rope_kv_write as rope_kv_write_reference
from shared.ops.rotary import rotary_angles
from shared.ops.triton.activation import silu_mul
from shared.ops.triton.argmax import argmax
from shared.ops.triton.context import gather_context, join_attention
from shared.ops.triton.decode_attention import AttentionPlan, DecodeAttention
from shared.ops.triton.gather_blocks import gather_blocks
from shared.ops.triton.gemv import GemvPlan, gemv
from shared.ops.triton.norm import add_rms_norm, rms_norm
from shared.ops.triton.rope_kv_write import rope_kv_write
from shared.ops.triton.rotary import rotary_angles as rotary_angles_kernel
from shared.ops.triton.skinny_linear import SkinnyLinear, SkinnyPlan

MAX_ERROR = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Of ‖out - ref‖ / ‖ref‖.  A result rounded once to bfloat16 is off by 2^-9 / sqrt(3) = 1.1e-3, to
float16 by 1.4e-4; attention also rounds its weights, and the factor that is left is 4 to 5.
float32 accumulates a few thousand roundings of 6e-8 at random."""

EPS = 1e-5


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Return ‖out - ref‖ / ‖ref‖; NaN where either has one."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The shape of an attention check; context lengths are one a sequence, 0 is padding."""

    context_lens: tuple[int, ...]
    group: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_layers: int = 2
    dtype: torch.dtype = torch.float32
    plan: AttentionPlan | None = None
    window: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """Arguments for the kernel and its reference."""

    qkv: Tensor
    cos: Tensor
    sin: Tensor
    slot_mapping: Tensor
    pools: PoolPair
    block_tables: Tensor
    context_lens: Tensor


def attention_inputs(case: Attention, device: str) -> AttentionInputs:
    """Scatter random contexts over two pools of NaN, every table over both.

    The newest token of each is not there yet: its block is an own one, and it comes with the step.
    """
    width = max(1, *(-(-length // case.block_size) for length in case.context_lens))
    num_blocks = len(case.context_lens) * width + 1
    shape = (num_blocks, case.num_layers, 2, case.num_kv_heads, case.block_size, case.head_dim)
    own, peer = (torch.full(shape, float("nan"), dtype=case.dtype, device=device) for _ in range(2))
    tables = torch.full((len(case.context_lens), width + 1), -(2**31), dtype=torch.int32)
    slots = torch.full((len(case.context_lens),), PAD_SLOT)
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    for row, length in enumerate(case.context_lens):
        for index in range(-(-length // case.block_size)):
            is_last = (index + 1) * case.block_size >= length
            block, is_peer = free.pop(), not is_last and bool(torch.rand(()) < 0.5)
            num_tokens = min(case.block_size, length - 1 - index * case.block_size)
            content = torch.randn(2, case.num_kv_heads, num_tokens, case.head_dim)
            # Each head its own level: a kernel that reads a neighbour's shows.
            content[1] += torch.arange(case.num_kv_heads).view(-1, 1, 1)
            pool = peer if is_peer else own
            pool[block, case.num_layers - 1, :, :, :num_tokens] = content.to(pool)
            entry = torch.tensor(block, dtype=torch.int32)
            tables[row, index] = peer_entries(entry) if is_peer else entry
            if is_last:
                slots[row] = block * case.block_size + (length - 1) % case.block_size
    wavelengths = 10_000 ** -(torch.arange(0, case.head_dim, 2) / case.head_dim)
    positions = torch.tensor(case.context_lens, device=device)
    cos, sin = rotary_angles(positions, wavelengths.to(device))
    qkv = torch.randn(len(slots), (case.group + 2) * case.num_kv_heads, case.head_dim)
    return AttentionInputs(
        qkv=qkv.to(device, case.dtype),
        cos=cos,
        sin=sin,
        slot_mapping=slots.to(device),
        pools=PoolPair.of(own, peer),
        block_tables=tables.to(device),
        context_lens=torch.tensor(case.context_lens, dtype=torch.int32, device=device),
    )


def kernel_for(case: Attention, device: str) -> DecodeAttention:
    """Return the kernel with scratch memory for a case."""
    return DecodeAttention(
        max_batch=len(case.context_lens),
        max_context_len=max(case.context_lens),
        num_heads=case.group * case.num_kv_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        device=device,
        plan=case.plan,
    )


def in_float64(
    inputs: AttentionInputs, *, layer: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return the reference's result computed in float64, and its own pool."""
    pools = PoolPair.of(inputs.pools.own.double(), inputs.pools.peer.double())
    attended = decode_step(
        inputs.qkv.double(),
        inputs.cos.double(),
        inputs.sin.double(),
        inputs.slot_mapping,
        pools,
        inputs.block_tables,
        inputs.context_lens,
        layer=layer,
        scale=scale,
        window=window,
    )
    return attended, pools.own


def check_decode_attention(case: Attention, device: str) -> float:
    """Return the error; twice with the same scratch memory, which must be left as it was found."""
    inputs, kernel = attention_inputs(case, device), kernel_for(case, device)
    layer, scale = case.num_layers - 1, case.head_dim**-0.5
    how = {"layer": layer, "scale": scale, "window": case.window}
    expected, expected_pool = in_float64(inputs, **how)
    first = kernel(*vars(inputs).values(), **how)
    second = kernel(*vars(inputs).values(), **how)
    assert torch.equal(first, second)
    error = relative_error(first, expected)
    assert error < MAX_ERROR[case.dtype], f"{case}: off by {error:.1e}"
    for row, length in enumerate(case.context_lens):
        assert length or not first[row].any(), "a padding row is not zero"
    # The newest tokens were written, and nothing else.
    assert torch.equal(inputs.pools.own.isnan(), expected_pool.isnan())
    written = relative_error(inputs.pools.own.nan_to_num(), expected_pool.nan_to_num())
    assert written < MAX_ERROR[case.dtype], f"{case}: wrote what is off by {written:.1e}"
    return error


def check_rope_kv_write(
    dtype: torch.dtype, device: str, *, heads: tuple[int, int] = (6, 2), head_dim: int = 64
) -> float:
    """Return the worse error of queries and pool; padding and other layers must stay NaN."""
    num_heads, num_kv_heads = heads
    slots = torch.tensor([35, PAD_SLOT, 16, 0, 63], device=device)
    qkv = torch.randn(len(slots), num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    wavelengths = 10_000 ** -(torch.arange(0, head_dim, 2) / head_dim)
    positions = torch.tensor([3, 0, 2_000, 17, 5], device=device)
    cos, sin = rotary_angles(positions, wavelengths.to(device))
    shape = (4, 3, 2, num_kv_heads, 16, head_dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=device)
    expected_pool = pool.double()
    query = rope_kv_write(qkv, cos, sin, pool[:, 1], slots)
    expected = rope_kv_write_reference(
        qkv.double(), cos.double(), sin.double(), expected_pool[:, 1], slots
    )
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    # Values pass through untouched.
    assert torch.equal(pool[:, 1, 1].nan_to_num(), expected_pool[:, 1, 1].nan_to_num().to(dtype))
    errors = (
        relative_error(query, expected),
        relative_error(pool.nan_to_num(), expected_pool.nan_to_num()),
    )
    assert max(errors) < MAX_ERROR[dtype], f"off by {errors}"
    return max(errors)


def check_norm(dtype: torch.dtype, device: str, *, width: int = 576) -> float:
    """Return the worse error of both norms; the residual must hold the rounded sum exactly."""
    x, residual = (torch.randn(3, width).to(device, dtype) for _ in range(2))
    weight = torch.randn(width, device=device)
    total = x + residual
    alone = relative_error(rms_norm(x, weight, EPS), _norm_in_float64(x, weight))
    behind = relative_error(add_rms_norm(x, residual, weight, EPS), _norm_in_float64(total, weight))
    assert torch.equal(residual, total)
    assert max(alone, behind) < MAX_ERROR[dtype], f"off by {alone:.1e}, {behind:.1e}"
    return max(alone, behind)


def _norm_in_float64(x: Tensor, weight: Tensor) -> Tensor:
    """Return the definition; the reference computes in float32 whatever it is given."""
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    reference = add_rms_norm_reference(x.clone(), torch.zeros_like(x), weight, EPS)
    assert relative_error(reference, normed) < MAX_ERROR[x.dtype]
    return normed


def check_silu_mul(dtype: torch.dtype, device: str, *, width: int = 1_100) -> float:
    """Return the error; a row's last thread block is partly filled."""
    gate_up = (torch.randn(3, 2 * width) * 4).to(device, dtype)
    error = relative_error(silu_mul(gate_up), silu_mul_reference(gate_up.double()))
    assert error < MAX_ERROR[dtype], f"off by {error:.1e}"
    return error


def check_gather_blocks(dtype: torch.dtype, device: str, *, num_programs: int) -> None:
    """Whole blocks arrive bit for bit, NaN included, and no other block is touched."""
    # 69,120 bytes in bfloat16: one whole piece and a part of the next.
    shape = (9, 3, 2, 5, 16, 72)
    source, target = (torch.randn(shape).to(device, dtype) for _ in range(2))
    source[4] = float("nan")
    source_ids = torch.tensor([7, 4, 1, 2], device=device)
    target_ids = torch.tensor([3, 1, 8, 5], device=device)
    expected = target.clone()
    gather_blocks_reference(source, expected, source_ids, target_ids, num_programs=num_programs)
    gather_blocks(source, target, source_ids, target_ids, num_programs=num_programs)
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


def check_rotary_angles(device: str) -> None:
    """Angles up to 131,071 radians; all that a float32 of them can tell is there."""
    positions = torch.tensor([0, 1, 4_000, 131_071], device=device)
    wavelengths = (500_000 ** -(torch.arange(0, 40, 2) / 40)).to(device)
    for out, expected in zip(
        rotary_angles_kernel(positions, wavelengths),
        rotary_angles(positions, wavelengths),
        strict=True,
    ):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def check_argmax(device: str, *, width: int) -> None:
    """The largest wins wherever it stands, and the first of several."""
    x = torch.randn(6, width)
    x[0, width - 1] = x[1, 0] = 50.0
    x[2, width // 3] = x[2, width - 1] = 50.0
    x[3] = -1.0
    x[4] = float("-inf")
    expected = [width - 1, 0, width // 3, 0, 0, int(x[5].argmax())]
    assert argmax(x.to(device)).tolist() == expected


def check_gemv(dtype: torch.dtype, device: str, *, width: int, num_outputs: int) -> float:
    """Return the worst error of the product alone, behind a norm, gated, and added."""
    plan = GemvPlan(outputs=8, columns=128, num_stages=3, num_warps=4)
    x, residual = torch.randn(1, width).to(device, dtype), torch.randn(1, num_outputs)
    weight = (torch.randn(2 * num_outputs, width) * width**-0.5).to(device, dtype)
    norm, residual = torch.rand(width, device=device) + 0.5, residual.to(device, dtype)
    normed = _norm_in_float64(x, norm)
    both = normed @ weight.double().t()
    half = weight[:num_outputs]
    cases = {
        "alone": (gemv(x, half, plan=plan), x.double() @ half.double().t()),
        "normed": (gemv(x, weight, plan=plan, norm=norm, eps=EPS, out_dtype=torch.float32), both),
        "gated": (
            gemv(x, weight, plan=plan, norm=norm, eps=EPS, is_gate=True),
            silu_mul_reference(both),
        ),
        "added": (
            gemv(x, half, plan=plan, residual=residual.clone()),
            residual.double() + x.double() @ half.double().t(),
        ),
    }
    return _worst_error(cases, dtype)


def check_skinny(
    dtype: torch.dtype, device: str, *, num_rows: int, width: int, num_outputs: int
) -> float:
    """Return the worst error of the product alone, gated, and in parts that are added."""
    x = torch.randn(num_rows, width).to(device, dtype)
    weight = (torch.randn(2 * num_outputs, width) * width**-0.5).to(device, dtype)
    residual = torch.randn(num_rows, num_outputs).to(device, dtype)
    linear = SkinnyLinear(device=torch.device(device))
    whole = SkinnyPlan(outputs=32, columns=64, splits=1, num_stages=3, num_warps=4)
    parts = replace(whole, outputs=64, splits=4)
    half = weight[:num_outputs]
    both = x.double() @ weight.double().t()
    added = residual.double() + x.double() @ half.double().t()
    again = linear(x, half, plan=parts, residual=residual.clone())
    cases = {
        "alone": (linear(x, weight, plan=whole, out_dtype=torch.float32), both),
        "gated": (linear(x, weight, plan=whole, is_gate=True), silu_mul_reference(both)),
        "added": (linear(x, half, plan=parts, residual=residual.clone()), added),
    }
    assert torch.equal(cases["added"][0], again), "parts are added in one order"
    return _worst_error(cases, dtype)


def _worst_error(cases: dict[str, tuple[Tensor, Tensor]], dtype: torch.dtype) -> float:
    errors = {name: relative_error(out, expected) for name, (out, expected) in cases.items()}
    assert max(errors.values()) < MAX_ERROR[dtype], f"off by {errors}"
    return max(errors.values())


def check_context(dtype: torch.dtype, device: str) -> None:
    """Contexts arrive bit for bit with zeros behind them; two halves join to the whole."""
    pool = torch.full((9, 3, 2, 5, 4, 24), float("nan"), dtype=dtype, device=device)
    table = torch.tensor([3, 1, 7], device=device)
    pool[table, 1] = torch.randn(3, 2, 5, 4, 24).to(device, dtype)
    pool[7, 1, :, :, 2:] = float("nan")
    arguments = (pool[:, 1], table, 10)
    gathered = gather_context(*arguments, padded_len=13)
    assert torch.equal(gathered, gather_context_reference(*arguments, padded_len=13))

    outs = [torch.randn(6, 5, 24).to(device, dtype) for _ in range(2)]
    logs = [torch.randn(5, 6, device=device) for _ in range(2)]
    out, log = outs[0].clone(), logs[0].clone()
    wide, wide_log = outs[0].double(), logs[0].double()
    join_attention(out, log, outs[1], logs[1])
    join_attention_reference(wide, wide_log, outs[1].double(), logs[1].double())
    assert relative_error(out, wide) < MAX_ERROR[dtype]
    assert relative_error(log, wide_log) < MAX_ERROR[torch.float32]
