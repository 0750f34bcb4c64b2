"""Transformers' LlamaForCausalLM over our weights: what our logits and tokens are held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import LlamaForCausalLM

    from shared.model.spec import ModelSpec

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
"""Our names of a layer's weights, and theirs."""


def llama_for_causal_lm(spec: ModelSpec, tensors: Mapping[str, Tensor]) -> LlamaForCausalLM:
    """Return their model over the very same tensors, which are shared and not copied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context_tokens,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied_embeddings,
        bos_token_id=spec.bos_id,
        eos_token_id=None,
    )
    theirs = {
        "model.embed_tokens.weight": tensors["embed"],
        "model.norm.weight": tensors["final_norm"],
        "lm_head.weight": tensors["embed" if spec.tied_embeddings else "lm_head"],
    }
    for index in range(spec.num_layers):
        for our_name, their_name in LAYER_NAMES.items():
            tensor = tensors[f"layers.{index}.{our_name}"]
            theirs[f"model.layers.{index}.{their_name}.weight"] = tensor
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # The rotary buffers are computed, not loaded, so they must not stay on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.load_state_dict(theirs, strict=True, assign=True)
    model.train(mode=False)
    return model


@torch.inference_mode()
def generate_greedily(
    model: LlamaForCausalLM, token_ids: list[int], *, num_tokens: int
) -> list[int]:
    """Return exactly `num_tokens` ids of transformers' own `generate`, whatever they are."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(token_ids) :].tolist()
    return ids


@torch.inference_mode()
def teacher_forced_logits(model: LlamaForCausalLM, token_ids: list[int]) -> Tensor:
    """Return the logits after every token: [num_tokens, vocab_size]."""
    logits: Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits
