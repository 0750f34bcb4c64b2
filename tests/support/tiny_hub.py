"""Tiny Hugging Face directories, written by transformers: random weights, a real tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

TEXTS = (
    "Why is the sky blue? Because air scatters blue light.",
    "  two  spaces, 1234567890 digits,\ttabs\nand lines\n\n",
    "def f(x): return x ** 2  # naïve café, 東京, 🦊",
)
"""What the tokenizers are trained on, and some of what they are asked."""

SPECIAL = ("<|end|>", "<|start|>", "<|pad|>")
END, START, PAD = 0, 1, 2

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Scaling that shows within the first hundred positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One kind of model: transformers' class, and what sets it apart."""

    family: str
    config: dict[str, Any] = field(default_factory=dict)


RECIPES = {
    "llama": Recipe(family="Llama"),
    "llama-tied": Recipe(family="Llama", config={"tie_word_embeddings": True}),
    "llama3": Recipe(family="Llama", config={"rope_parameters": LLAMA3}),
    "mistral": Recipe(family="Mistral", config={"sliding_window": None}),
    "mistral-window": Recipe(family="Mistral", config={"sliding_window": 24}),
    "qwen2": Recipe(family="Qwen2", config={"tie_word_embeddings": True}),
    "qwen3": Recipe(family="Qwen3", config={"head_dim": 24}),
    "qwen3-window": Recipe(
        family="Qwen3",
        config={
            "head_dim": 24,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 0,
        },
    ),
}


def write_hub_model(folder: Path, name: str = "llama", **save: Any) -> PreTrainedModel:  # noqa: ANN401
    """Write the model of a recipe, tokenizer and template beside it; return transformers' own.

    Args:
        folder: Where to.
        name: The recipe.
        save: Arguments of `save_pretrained`, such as `max_shard_size`.
    """
    import transformers

    recipe = RECIPES[name]
    config = getattr(transformers, f"{recipe.family}Config")(
        **{
            "vocab_size": 384,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "bos_token_id": START,
            "eos_token_id": END,
            "pad_token_id": PAD,
            "attn_implementation": "eager",
            **recipe.config,
        }
    )
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, f"{recipe.family}ForCausalLM")(config)
    with torch.no_grad():  # biases and norms begin as 0 and 1, which would hide a mistake
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.train(mode=False)
    model.save_pretrained(folder, **save)
    write_tokenizer(folder)
    return model


def write_tokenizer(folder: Path, *, kind: str = "byte-level", **options: Any) -> None:  # noqa: ANN401
    """Write a tokenizer of up to 384 tokens, trained on `TEXTS`.

    Args:
        folder: Where to.
        kind: `byte-level`, as Llama 3 and Qwen have it, or `sentence-piece`, as Llama 2.
        options: More of `tokenizer_config.json`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = list(SPECIAL)
    if kind == "byte-level":
        library = Tokenizer(models.BPE())
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library = Tokenizer(models.BPE(unk_token=SPECIAL[END], byte_fallback=True, fuse_unk=True))
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        library.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
        alphabet, special = [], [*special, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    if kind != "byte-level":  # tokens for bytes are ordinary ones, which no trainer makes
        written = json.loads(library.to_str())
        written["added_tokens"] = [t for t in written["added_tokens"] if t["content"] in SPECIAL]
        library = Tokenizer.from_str(json.dumps(written))
    library.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[START]} $A", special_tokens=[(SPECIAL[START], START)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=library,
        bos_token=SPECIAL[START],
        eos_token=SPECIAL[END],
        pad_token=SPECIAL[PAD],
        chat_template=TEMPLATE,
        **options,
    ).save_pretrained(folder)
