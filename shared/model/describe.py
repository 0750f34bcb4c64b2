"""What a model's files say of it, without its weights and without torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from shared.model.gguf_file import content_id, read_header
from shared.model.gguf_model import read_chat_template, read_spec, read_vocabulary
from shared.model.hub_config import read_hub_spec, read_hub_template
from shared.model.hub_files import find_hub_weights, hub_content_id
from shared.model.json_file import read_json, read_json_if_there
from shared.model.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """One model."""

    path: Path
    spec: ModelSpec
    content_id: str
    file_bytes: int
    """Of all its weights' files."""
    tokenizer: str
    """The algorithm's name, as the file has it."""
    pre: str | None
    """The name of the rule that splits text, where the file names one."""
    add_bos: bool | None
    """Whether every text begins with the `bos` token; None where only the tokenizer knows."""
    has_chat_template: bool


def describe_model(path: Path) -> ModelDescription:
    """Describe the GGUF file or the Hugging Face directory at `path`.

    Raises:
        ModelFileError: A file is missing, damaged, or holds what we cannot run.
    """
    # os.path's answer, since Path's raises where a folder on the way is closed to this user.
    return _describe_folder(path) if os.path.isdir(path) else _describe_gguf(path)


def _describe_gguf(path: Path) -> ModelDescription:
    header = read_header(path)
    vocabulary = read_vocabulary(header)
    return ModelDescription(
        path=path,
        spec=read_spec(header),
        content_id=content_id(header),
        file_bytes=header.size_bytes,
        tokenizer=vocabulary.model,
        pre=vocabulary.pre,
        add_bos=vocabulary.add_bos,
        has_chat_template=read_chat_template(header) is not None,
    )


def _describe_folder(folder: Path) -> ModelDescription:
    spec = read_hub_spec(folder)
    weights = find_hub_weights(folder, spec)
    files = {tensor.path for tensor in weights.tensors.values()}
    model = read_json(folder / "tokenizer.json").child("model")
    config = read_json_if_there(folder / "tokenizer_config.json")
    return ModelDescription(
        path=folder,
        spec=spec,
        content_id=hub_content_id(weights),
        file_bytes=sum(file.stat().st_size for file in files),
        tokenizer="unknown" if model is None else model.optional("type", "unknown"),
        pre=None,
        add_bos=config.optional("add_bos_token", False) if "add_bos_token" in config else None,
        has_chat_template=read_hub_template(folder) is not None,
    )
