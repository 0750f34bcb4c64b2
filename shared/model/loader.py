"""Loads a model whole: shape, weights, tokenizer and chat template.

From a GGUF file, from a Hugging Face directory, or with random weights of a named shape.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shared.model.chat_template import ChatTemplate
from shared.model.fetch import resolve_model
from shared.model.gguf_file import content_id, read_header
from shared.model.gguf_model import (
    read_chat_template,
    read_spec,
    read_special_tokens,
    read_vocabulary,
)
from shared.model.gguf_tokenizer import vocabulary_tokenizer
from shared.model.hub_config import read_hub_spec, read_hub_special_tokens, read_hub_template
from shared.model.hub_files import find_hub_weights, hub_content_id
from shared.model.hub_tokenizer import hub_tokenizer
from shared.model.hub_weights import load_hub_weights
from shared.model.random_model import (
    PREFIX,
    SEED,
    SHARED_LAYERS,
    byte_tokenizer,
    find_shape,
    random_tensors,
)
from shared.model.weights import TORCH_DTYPES, Progress, load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from shared.model.spec import DType, ModelSpec
    from shared.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, ready to be run."""

    spec: ModelSpec
    tensors: dict[str, torch.Tensor]
    """As `load_weights` returns them.  The forward pass may take them out to fuse them."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    """Not started yet; None when the model has none."""
    content_id: str
    """Tells models of one shape apart; `gguf_file.content_id` and `hub_files.hub_content_id` say
    what it covers."""


def load_model(
    path_or_name: str,
    dtype: DType,
    device: torch.device | str = "cpu",
    *,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the model that a configuration names.

    Args:
        path_or_name: A name of the catalogue, the path of a GGUF file or of a Hugging Face
            directory, or `random:` and a shape's name.
        dtype: What the weights are kept in.
        device: Where the weights go.
        progress: Called with (bytes done, bytes in all) as weights arrive.

    Raises:
        UnknownModelError: The model was not fetched yet, or there is none of that name.
        ModelFileError: The file is missing, damaged, or holds what we cannot run.
    """
    if path_or_name.startswith(PREFIX):
        return _random_model(path_or_name, dtype, device)
    return load_model_file(resolve_model(path_or_name), dtype, device=device, progress=progress)


def load_model_file(
    path: Path,
    dtype: DType,
    *,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> LoadedModel:
    """Load the GGUF file or the Hugging Face directory at `path`.

    Args:
        path: The file or directory.
        dtype: What the weights are kept in.
        device: Where the weights go.
        progress: Called with (bytes done, bytes in all) as weights arrive.

    Raises:
        ModelFileError: A file is missing, damaged, or holds what we cannot run.
    """
    # os.path's answer, since Path's raises where a folder on the way is closed to this user.
    load = _load_folder if os.path.isdir(path) else _load_gguf
    return load(path, dtype, torch.device(device), progress)


def _load_gguf(
    path: Path, dtype: DType, device: torch.device, progress: Progress | None
) -> LoadedModel:
    header = read_header(path)
    spec = read_spec(header)
    # Before the weights, so that a tokenizer we cannot build costs no waiting.
    tokenizer = vocabulary_tokenizer(read_vocabulary(header), source=path)
    template = read_chat_template(header)
    return LoadedModel(
        spec=spec,
        tokenizer=tokenizer,
        chat_template=_template(template, read_special_tokens(header)),
        tensors=load_weights(header, spec, dtype, progress, device=device),
        content_id=content_id(header),
    )


def _load_folder(
    folder: Path, dtype: DType, device: torch.device, progress: Progress | None
) -> LoadedModel:
    spec = read_hub_spec(folder)
    weights = find_hub_weights(folder, spec)
    tokenizer = hub_tokenizer(folder, vocab_size=spec.vocab_size)
    template = read_hub_template(folder)
    return LoadedModel(
        spec=spec,
        tokenizer=tokenizer,
        chat_template=_template(template, read_hub_special_tokens(folder)),
        tensors=load_hub_weights(weights, dtype, device=device, progress=progress),
        content_id=hub_content_id(weights),
    )


def _template(source: str | None, variables: dict[str, str]) -> ChatTemplate | None:
    return None if source is None else ChatTemplate(source, variables=variables)


def _random_model(name: str, dtype: DType, device: torch.device | str) -> LoadedModel:
    spec = find_shape(name)
    share_layers = spec.name in SHARED_LAYERS
    return LoadedModel(
        spec=spec,
        tensors=random_tensors(
            spec, dtype=TORCH_DTYPES[dtype], device=device, share_layers=share_layers
        ),
        tokenizer=byte_tokenizer(spec),
        chat_template=None,
        # A CPU and a GPU make different numbers of one seed.
        content_id=f"{name}, seed {SEED}, made by {torch.device(device).type}",
    )
