"""Whole models of every family, held against transformers: the same logits, the same tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import torch

from shared.engine.local import LocalEngine
from shared.model.llama import Llama
from shared.model.loader import load_model, load_model_file
from tests.support.tiny_hub import RECIPES, TEXTS, write_hub_model, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.model.loader import LoadedModel

MAX_DIFFERENCE = 1e-4
"""Between two float32 implementations, on logits of about 1."""

PROMPT = [3 + (29 * place) % 375 for place in range(70)]


@pytest.mark.parametrize("name", RECIPES)
@torch.inference_mode()
def test_every_family_s_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """In one chunk, in small ones that cross windows and blocks, and one token at a time."""
    reference = write_hub_model(tmp_path, name)
    expected = reference(torch.tensor([PROMPT])).logits[0]
    loaded = load_model_file(tmp_path, "float32")
    model = Llama(loaded.spec, loaded.tensors)
    assert not loaded.tensors, "every weight has its place"
    for budget in (len(PROMPT), 17, 1):
        engine = LocalEngine(model, num_blocks=20, block_size=8, token_budget=budget)
        ours = engine.prompt_logits(PROMPT)
        assert float((ours - expected).abs().max()) < MAX_DIFFERENCE
    # What a family adds must show in these logits, or nothing was tested.
    assert float(expected.abs().max()) > 0.1


@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen2", "qwen3"])
@torch.inference_mode()
def test_decoding_through_block_tables_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    """The path of a GPU's graphs, in its references."""
    from shared.kv.pool import LocalPool
    from shared.model.batch import DecodeBatch
    from shared.ops.pool_pair import PoolPair

    reference = write_hub_model(tmp_path, name)
    expected = reference(torch.tensor([PROMPT])).logits[0]
    loaded = load_model_file(tmp_path, "float32")
    spec, model = loaded.spec, Llama(loaded.spec, loaded.tensors)
    layout = spec.kv_layout(num_blocks=20, block_size=8, dtype="float32")
    pools = PoolPair.of(LocalPool(layout, fill=float("nan")).kv)
    table = torch.arange(1, 11, dtype=torch.int32).unsqueeze(0)
    for position, token_id in enumerate(PROMPT):
        batch = DecodeBatch(
            token_ids=torch.tensor([token_id]),
            positions=torch.tensor([position]),
            slot_mapping=torch.tensor([8 + position]),
            block_tables=table,
            context_lens=torch.tensor([position + 1], dtype=torch.int32),
        )
        logits = model.logits(model.decode(batch, pools))[0]
        assert float((logits - expected[position]).abs().max()) < MAX_DIFFERENCE


def test_what_sets_a_family_apart_changes_the_answer(tmp_path: Path) -> None:
    """Without its window, its scaling, its biases or its norms each would be another model."""
    from dataclasses import replace

    changes = {
        "llama3": {"rope_scaling": None},
        "mistral-window": {"sliding_window": None},
    }
    for name, change in changes.items():
        reference = write_hub_model(tmp_path / name, name)
        with torch.inference_mode():
            expected = reference(torch.tensor([PROMPT])).logits[0]
        loaded = load_model_file(tmp_path / name, "float32")
        model = Llama(replace(loaded.spec, **change), loaded.tensors)  # type: ignore[arg-type]  # one field each
        ours = LocalEngine(model, num_blocks=20).prompt_logits(PROMPT)
        assert float((ours - expected).abs().max()) > 10 * MAX_DIFFERENCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hub")
    write_hub_model(path, "llama", max_shard_size="100KB")
    return path


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(str(folder), "float32")


def test_a_directory_is_a_whole_model(folder: Path, loaded: LoadedModel) -> None:
    """Over several shards: shape, weights, tokenizer, template and identity."""
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    assert (loaded.spec.bos_id, loaded.spec.eos_ids) == (1, (0,))
    assert len(loaded.content_id) == 32
    assert loaded.tensors["embed"].shape == (384, 64)
    assert loaded.chat_template is not None


def test_a_conversation_has_the_tokens_that_transformers_gives_it(
    folder: Path, loaded: LoadedModel
) -> None:
    """Template and tokenizer together; the `bos` token, which both write, is there once."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[2]}]
    assert loaded.chat_template is not None
    with closing(loaded.chat_template) as template:
        text = template.render(messages)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text == expected
    ids = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert loaded.tokenizer.encode(text) == ids


def test_a_greedy_answer_is_that_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        output = theirs.generate(
            torch.tensor([PROMPT]),
            attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=20,
            min_new_tokens=20,
        )
    fresh = load_model_file(folder, "float32")
    engine = LocalEngine(Llama(fresh.spec, fresh.tensors), num_blocks=20)
    (ours,) = engine.generate([PROMPT], max_tokens=20, ignore_eos=True)
    assert ours == output[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_of_any_type_are_kept_as_asked(tmp_path: Path, dtype: str) -> None:
    """Stored as bfloat16, converted straight into their final memory."""
    reference = write_hub_model(tmp_path, "llama")
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load_model_file(tmp_path, dtype)  # type: ignore[arg-type]  # one of the names
    kept = getattr(torch, dtype)
    assert {tensor.dtype for tensor in loaded.tensors.values()} == {kept}
    stored = reference.get_input_embeddings().weight
    assert torch.equal(loaded.tensors["embed"], stored.to(kept))


def test_loading_and_fusing_need_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    """At most 1.2 times what is kept, files' pages included, head of 8 bits and all.

    The model is large enough for what one layer and one run take to be little beside it.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16_384,
        hidden_size=512,
        intermediate_size=1_536,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    program = f"""
import json, torch
from pathlib import Path
torch.set_num_threads(1)
from shared.model.llama import Llama
from shared.model.loader import load_model_file

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

torch.zeros(512, 512) @ torch.zeros(512, 512)  # what torch sets up once
before = peak_bytes()
loaded = load_model_file(Path({str(tmp_path)!r}), "float32")
kept = sum(tensor.nbytes for tensor in loaded.tensors.values())
model = Llama(loaded.spec, loaded.tensors)
kept += 16_384 * 512
print(json.dumps([peak_bytes() - before, kept]))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    grown_bytes, kept_bytes = json.loads(output)
    assert kept_bytes > 300 << 20
    assert grown_bytes <= 1.2 * kept_bytes
