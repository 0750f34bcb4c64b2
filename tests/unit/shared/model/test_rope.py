"""Wavelengths of the rotary embedding."""

from __future__ import annotations

import pytest
import torch

from shared.model.rope import inverse_wavelengths
from shared.model.spec import RopeScaling


def test_speeds_fall_geometrically_from_one_radian_a_position() -> None:
    """The first pair turns by 1 a position, the last by nearly 1 / theta."""
    speeds = inverse_wavelengths(8, 10_000.0).tolist()
    assert speeds == pytest.approx([1, 0.1, 0.01, 0.001], rel=1e-6)


def test_llama_3_slows_only_the_slow_pairs() -> None:
    """Pairs that turn often in the original context stay, rare ones slow by the whole factor."""
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=64
    )
    plain, scaled = inverse_wavelengths(64, 10_000.0), inverse_wavelengths(64, 10_000.0, scaling)
    turns = 64 * plain / (2 * torch.pi)
    ratio = scaled / plain
    torch.testing.assert_close(ratio[turns > 4], torch.ones(int((turns > 4).sum())))
    torch.testing.assert_close(ratio[turns < 1], torch.full((int((turns < 1).sum()),), 1 / 8))
    assert torch.all(ratio[1:] <= ratio[:-1] + 1e-6), "the change is gradual"


def test_llama_3_s_scaling_is_that_of_transformers() -> None:
    """To the bit's neighbourhood, for the numbers of Llama 3.1."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        max_position_embeddings=131_072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_tokens=8192
    )
    torch.testing.assert_close(inverse_wavelengths(128, 500_000.0, scaling), theirs)
