"""A model's vocabulary as its file tells it: pure data from which a tokenizer is built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """What a token is for, numbered as GGUF files do."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    """Marks structure (`<|im_end|>`); has no text of its own."""
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Tokens and merges of a byte-level BPE, in id order and merge order."""

    model: str
    """The algorithm's name in the file; `gpt2` is byte-level BPE."""
    pre: str
    """The name of the rule that splits text before any merge."""
    tokens: tuple[str, ...]
    """Token texts by id, in the byte-level alphabet (`Ġ` is a space)."""
    token_types: tuple[int, ...]
    """`TokenType` by id; as long as `tokens`."""
    merges: tuple[str, ...]
    """Pairs of token texts, each pair separated by one space, the most urgent first."""
    add_bos: bool
    """Every encoded text begins with the `bos_id` token."""
    bos_id: int | None
