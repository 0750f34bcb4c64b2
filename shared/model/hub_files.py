"""The weights of a Hugging Face directory: which file holds which, under our names.

Pure but for reading headers; no tensor data is read and no torch imported.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shared.model.errors import ModelFileError
from shared.model.json_file import read_json
from shared.model.safetensors_file import StoredTensor, read_safetensors_header
from shared.model.tensors import tensor_shapes

if TYPE_CHECKING:
    from shared.model.spec import ModelSpec

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"

MODEL_TENSORS = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
"""The files' names of our tensors; those of layer N stand behind `layers.N.`."""

UNUSED = re.compile(r".*rotary_emb\.inv_freq\Z")
"""Tensors that some files carry and nobody needs: the rotation is computed."""

CONTENT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    INDEX,
)
"""What, beside the weights, makes the model that it is."""

SAMPLE_BYTES = 4096
"""How much of each tensor goes into a content id: one page, as for GGUF files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubWeights:
    """The weights of a directory, found and checked but not read."""

    folder: Path
    tensors: dict[str, StoredTensor]
    """By our names."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them in their files."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def find_hub_weights(folder: Path, spec: ModelSpec) -> HubWeights:
    """Find every weight of a model.

    Raises:
        ModelFileError: A shard or a tensor is missing, superfluous, misshapen, damaged, or of a
            type that cannot be read.
    """
    stored = _stored_tensors(folder)
    shapes = tensor_shapes(spec)
    names = {ours: _their_name(ours) for ours in shapes}
    source = folder / (INDEX if (folder / INDEX).exists() else WHOLE)
    missing = sorted(set(names.values()) - stored.keys())
    if missing:
        raise ModelFileError(source, f"lacks {len(missing)} tensors, {missing[0]!r} first")
    ignored = {MODEL_TENSORS["lm_head"]} if spec.tied_embeddings else set()
    unknown = sorted(
        name for name in stored.keys() - set(names.values()) - ignored if UNUSED.match(name) is None
    )
    if unknown:
        # Biases, for one: leaving them out would compute another model.
        raise ModelFileError(
            source,
            f"has {len(unknown)} tensors that no {spec.architecture} model of ours uses, "
            f"{unknown[0]!r} first",
        )
    for ours, theirs in names.items():
        if stored[theirs].shape != shapes[ours]:
            raise ModelFileError(
                stored[theirs].path,
                f"has {theirs!r} of shape {[*stored[theirs].shape]}, "
                f"where config.json asks for {[*shapes[ours]]}",
            )
    return HubWeights(
        folder=folder, tensors={ours: stored[theirs] for ours, theirs in names.items()}
    )


def hub_content_id(weights: HubWeights) -> str:
    """Return 32 hex digits that differ between models, at a price that does not grow with them.

    Covers the configuration, tokenizer and template, where every tensor lies and as what, and the
    first `SAMPLE_BYTES` of each; it is no proof against a forged file.

    Raises:
        ModelFileError: A file changed or vanished since it was found.
    """
    digest = hashlib.sha256()
    for name in CONTENT_FILES:
        path = weights.folder / name
        if path.exists():
            data = path.read_bytes()
            digest.update(f"{name} {len(data)}\n".encode())
            digest.update(data)
    by_place = sorted(weights.tensors.values(), key=lambda at: (at.path.name, at.offset_bytes))
    for tensor in by_place:
        place = (tensor.path.name, tensor.name, tensor.dtype, tensor.shape, tensor.offset_bytes)
        digest.update(f"{place}\n".encode())
        try:
            with tensor.path.open("rb") as file:
                num_bytes = min(SAMPLE_BYTES, tensor.num_bytes)
                digest.update(os.pread(file.fileno(), num_bytes, tensor.offset_bytes))
        except OSError as error:
            raise ModelFileError(tensor.path, f"cannot be read: {error.strerror}") from error
    return digest.hexdigest()[:32]


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the directory, by the files' names."""
    index_path = folder / INDEX
    if not index_path.exists():
        if not (folder / WHOLE).exists():
            others = sorted(path.name for path in folder.glob("*.bin"))
            hint = "pickled weights are not read; save them as safetensors" if others else None
            raise ModelFileError(folder, f"has neither {WHOLE} nor {INDEX}", hint=hint)
        return read_safetensors_header(folder / WHOLE)
    index = read_json(index_path)
    weight_map = index.child("weight_map")
    if weight_map is None:
        raise index.fail("lacks `weight_map`")
    shards = {name: weight_map.require(name, str) for name in weight_map.values}
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(shards.values())):
        if Path(shard).name != shard:  # a path could lead anywhere
            raise index.fail(f"names the shard {shard!r}, which is no file of this folder")
        if not (folder / shard).exists():
            raise ModelFileError(
                folder, f"lacks the shard {shard!r} that {INDEX} names", hint="copy it there"
            )
        stored |= read_safetensors_header(folder / shard)
    for name, shard in shards.items():
        if name not in stored or stored[name].path.name != shard:
            raise ModelFileError(folder / shard, f"lacks {name!r}, which {INDEX} says is in it")
    return stored


def _their_name(ours: str) -> str:
    if ours in MODEL_TENSORS:
        return MODEL_TENSORS[ours]
    _, layer, name = ours.split(".")
    return f"model.layers.{layer}.{LAYER_TENSORS[name]}"
