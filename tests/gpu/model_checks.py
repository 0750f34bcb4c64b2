"""What the forward pass must show on any device, with the tiny model of `tests.support`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from shared.engine.batch import SequenceStep, build_batch, pack_steps
from shared.engine.padded_steps import Places, fill, num_entries_for, padded_batch
from shared.kv.layout import KVLayout
from shared.model.batch import DecodeBatch
from shared.model.llama import Llama
from shared.model.spec import RopeScaling
from shared.ops.forward_ops import ForwardOps
from shared.ops.kv_write import PAD_SLOT
from shared.ops.pool_pair import PoolPair, peer_entries
from shared.ops.sampling import SamplingParams
from tests.support.tiny_llama import random_tensors, tiny_spec

BLOCK_SIZE, NUM_BLOCKS = 8, 20

TOLERANCE = {torch.float32: 2e-5, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Of ‖logits - expected‖ / ‖expected‖ after three layers: some ten roundings of each number, to
2^-24, 2^-11 and 2^-8 of it, added at random, with a factor of about five for chance."""


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama3": {
        "rope_scaling": RopeScaling(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=16
        )
    },
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
"""What sets each family apart that every device runs."""


def tiny_model(
    dtype: torch.dtype, device: str, ops: ForwardOps | None, family: str = "llama"
) -> Llama:
    """Return a model whose heads are 16 wide: kernels load 16 bytes at once."""
    spec = dataclasses.replace(tiny_spec(), hidden_size=96, head_dim=16, **FAMILIES[family])
    tensors = random_tensors(spec)
    return Llama(spec, {name: tensor.to(device, dtype) for name, tensor in tensors.items()}, ops)


def pool_of(model: Llama) -> tuple[KVLayout, Tensor]:
    """Return a layout and a pool of it, full of NaN."""
    layout = model.spec.kv_layout(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="float32")
    return layout, torch.full(layout.shape, float("nan"), dtype=model.dtype, device=model.device)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Return token ids of the tiny vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, (num_tokens,), generator=generator).tolist()


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Return ‖out - expected‖ / ‖expected‖; NaN where either has one."""
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@torch.inference_mode()
def check_decode_follows_prefill(
    dtype: torch.dtype, device: str, ops: ForwardOps | None = None, family: str = "llama"
) -> None:
    """Prefill two prompts, decode two more tokens of each; the logits are the whole prefill's.

    One prompt's blocks are in the peer's pool but for the last, which decoding goes on in.
    """
    model = tiny_model(dtype, device, ops, family)
    layout, own = pool_of(model)
    peer = own.clone()
    ids = [prompt(21, 1), prompt(9, 2)]
    tables = [[3, 11, 7, 2], [15, 5, 1, 9]]
    whole = build_batch(
        [
            SequenceStep(token_ids=tokens, start_position=0, block_table=table, sampling=None)
            for tokens, table in zip(ids, tables, strict=True)
        ],
        layout,
        model.device,
        all_outputs=True,
    )
    expected = model.logits(model.forward(whole, own.clone()))

    for tokens, table in zip(ids, tables, strict=True):
        step = SequenceStep(
            token_ids=tokens[:-2], start_position=0, block_table=table, sampling=None
        )
        model.forward(build_batch([step], layout, model.device), own)
    block_tables = torch.tensor([*tables, [0] * 4], dtype=torch.int32, device=device)
    moved = tables[0][:2]  # whole blocks; the third is where the 20th token goes
    peer[moved], own[moved] = own[moved], float("nan")
    block_tables[0, :2] = peer_entries(block_tables[0, :2])

    model.prepare_decode(max_batch=3, max_context_len=4 * BLOCK_SIZE)
    pools = PoolPair.of(own, peer)
    for back in (2, 1):
        positions = [len(tokens) - back for tokens in ids]
        slots = [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, position in zip(tables, positions, strict=True)
        ]

        def column(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        batch = DecodeBatch(
            token_ids=column(*(tokens[-back] for tokens in ids), 0),
            positions=column(*positions, 0),
            slot_mapping=column(*slots, PAD_SLOT),
            block_tables=block_tables,
            context_lens=column(*(p + 1 for p in positions), 0, dtype=torch.int32),
        )
        logits = model.logits(model.decode(batch, pools))[:2]
        rows = [len(ids[0]) - back, len(ids[0]) + len(ids[1]) - back]
        error = relative_error(logits, expected[rows])
        assert error < TOLERANCE[dtype], f"{back} tokens from the end: off by {error:.1e}"


@torch.inference_mode()
def check_output_rows(dtype: torch.dtype, device: str, ops: ForwardOps | None = None) -> None:
    """The wanted rows equal those of all rows, and the pool is written whole either way."""
    model = tiny_model(dtype, device, ops)
    layout, kv = pool_of(model)
    steps = [
        SequenceStep(
            token_ids=prompt(num_tokens, num_tokens),
            start_position=0,
            block_table=table,
            sampling=sampling,
        )
        for num_tokens, table, sampling in (
            (13, [1, 2], SamplingParams()),
            (8, [3], None),
            (5, [4], SamplingParams()),
        )
    ]
    every_kv, no_kv = kv.clone(), kv.clone()
    every = model.forward(build_batch(steps, layout, model.device, all_outputs=True), every_kv)
    some = model.forward(build_batch(steps, layout, model.device), kv)
    assert some.shape == (2, model.spec.hidden_size)
    assert relative_error(some, every[[12, 25]]) < TOLERANCE[dtype]
    none = model.forward(build_batch(steps[1:2], layout, model.device), no_kv)
    assert none.shape == (0, model.spec.hidden_size)
    assert torch.equal(kv.nan_to_num(), every_kv.nan_to_num())
    assert relative_error(no_kv[3], kv[3]) < TOLERANCE[dtype]


@torch.inference_mode()
def check_padded_step(dtype: torch.dtype, device: str, ops: ForwardOps | None = None) -> None:
    """A step of fixed size gives the wanted rows of a plain one, and the same blocks."""
    model = tiny_model(dtype, device, ops)
    layout, kv = pool_of(model)
    padded_kv = kv.clone()
    places = Places(size=64, num_entries=num_entries_for(BLOCK_SIZE))
    chunks = ((0, 13, [1, 2, 9]), (0, 8, [3]), (13, 20, [1, 2, 9]))
    for first, *others in (chunks[:2], chunks[2:]):
        steps = [
            SequenceStep(
                token_ids=prompt(24, 1)[start:stop],
                start_position=start,
                block_table=table,
                sampling=SamplingParams(),
            )
            for start, stop, table in (first, *others)
        ]
        expected = model.forward(build_batch(steps, layout, model.device), kv)
        run = torch.zeros(places.num_numbers, dtype=torch.int64)
        fill(places, run, pack_steps(steps, layout))
        batch = padded_batch(places, run.to(model.device))
        out = model.finish(batch, model.begin(batch, padded_kv), padded_kv)
        assert relative_error(out[: len(steps)], expected) < TOLERANCE[dtype]
    assert torch.equal(padded_kv.isnan(), kv.isnan())
    assert relative_error(padded_kv.nan_to_num(), kv.nan_to_num()) < TOLERANCE[dtype]


@torch.inference_mode()
def check_device_equals_cpu(dtype: torch.dtype, device: str, family: str) -> None:
    """A prompt's logits are those that float32 gives on a CPU, up to the type's rounding."""
    tokens = prompt(40, 3)
    logits = []
    reference = tiny_model(torch.float32, "cpu", None, family)
    for model in (reference, tiny_model(dtype, device, None, family)):
        layout, kv = pool_of(model)
        step = SequenceStep(
            token_ids=tokens, start_position=0, block_table=[4, 9, 2, 7, 1], sampling=None
        )
        batch = build_batch([step], layout, model.device, all_outputs=True)
        logits.append(model.logits(model.forward(batch, kv)).cpu())
    assert relative_error(logits[1], logits[0]) < TOLERANCE[dtype]
