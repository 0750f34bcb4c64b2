"""Loads a model file whole: shape, weights, tokenizer and chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.model.chat_template import ChatTemplate
from shared.model.gguf_file import content_id, read_header
from shared.model.gguf_model import (
    read_chat_template,
    read_spec,
    read_special_tokens,
    read_vocabulary,
)
from shared.model.tokenizer import Tokenizer
from shared.model.weights import Progress, load_weights

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from shared.model.spec import DType, ModelSpec


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
    """Tells models of one shape apart; see `gguf_file.content_id` for what it covers."""


def load_model_file(path: Path, dtype: DType, *, progress: Progress | None = None) -> LoadedModel:
    """Load the GGUF file at `path`.

    Args:
        path: The file.
        dtype: What the weights are kept in, `float32` or `bfloat16`.
        progress: Called with (bytes done, bytes in all) as weights arrive.

    Raises:
        ModelFileError: The file is missing, damaged, or holds what we cannot run.
    """
    header = read_header(path)
    spec = read_spec(header)
    # Before the weights, so that a tokenizer we cannot build costs no waiting.
    tokenizer = Tokenizer(read_vocabulary(header), source=path)
    template = read_chat_template(header)
    if template is None:
        chat_template = None
    else:
        chat_template = ChatTemplate(template, variables=read_special_tokens(header))
    return LoadedModel(
        spec=spec,
        tensors=load_weights(header, spec, dtype, progress),
        tokenizer=tokenizer,
        chat_template=chat_template,
        content_id=content_id(header),
    )
