"""Builds the tokenizer of a GGUF file: a byte-level BPE over the file's own vocabulary.

Here is decided which pipeline a file's `pre` name stands for.  A wrong guess would split text
slightly differently than in training and nobody would see it, so a name that is not in
`PRE_TOKENIZERS` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shared.model.errors import ModelFileError
from shared.model.gguf_model import UNSUPPORTED_HINT
from shared.model.tokenizer import Tokenizer, TokenizerParts, byte_alphabet
from shared.model.vocabulary import TokenType, Vocabulary


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm() -> pre_tokenizers.PreTokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
}
"""How text is split before merging, by the name in `tokenizer.ggml.pre`."""


def vocabulary_tokenizer(vocabulary: Vocabulary, *, source: Path) -> Tokenizer:
    """Return the tokenizer of a vocabulary.

    Args:
        vocabulary: What the model's file says.
        source: The file, for messages.

    Raises:
        ModelFileError: The splitting rule is unknown, or the vocabulary contradicts itself.
    """
    if vocabulary.pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelFileError(
            source,
            f"splits text by the rule {vocabulary.pre!r} (tokenizer.ggml.pre); known are: {known}",
            hint=UNSUPPORTED_HINT,
        )
    texts = set(vocabulary.tokens)
    prefix = vocabulary.bos_id if vocabulary.add_bos else None
    return Tokenizer(
        TokenizerParts(
            library=_build(vocabulary, source),
            texts=vocabulary.tokens,
            token_bytes=tuple(_token_bytes(vocabulary, source)),
            prefix_ids=() if prefix is None else (prefix,),
            missing_bytes=bytes(
                byte for character, byte in byte_alphabet().items() if character not in texts
            ),
        )
    )


def _build(vocabulary: Vocabulary, source: Path) -> tokenizers.Tokenizer:
    ids = {text: token_id for token_id, text in enumerate(vocabulary.tokens)}
    if len(ids) != len(vocabulary.tokens):
        raise ModelFileError(source, "has two tokens of the same text")
    merges: list[tuple[str, str]] = []
    for merge in vocabulary.merges:
        left, _, right = merge.partition(" ")
        if not (left in ids and right in ids and left + right in ids):
            raise ModelFileError(source, f"has the merge {merge!r} of what are not its tokens")
        merges.append((left, right))
    library = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges))
    library.pre_tokenizer = PRE_TOKENIZERS[vocabulary.pre]()
    library.decoder = decoders.ByteLevel()
    by_type = list(zip(vocabulary.tokens, vocabulary.token_types, strict=True))
    # Taken whole wherever they stand in a text, before it is split.
    library.add_special_tokens(
        [_added(text) for text, kind in by_type if kind == TokenType.CONTROL]
    )
    library.add_tokens([_added(text) for text, kind in by_type if kind == TokenType.USER_DEFINED])
    return library


def _added(text: str) -> AddedToken:
    return AddedToken(text, normalized=False)


def _token_bytes(vocabulary: Vocabulary, source: Path) -> Iterable[bytes]:
    """Yield every token's bytes, by id."""
    alphabet = byte_alphabet()
    for text, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind == TokenType.CONTROL:
            yield b""
        elif kind == TokenType.USER_DEFINED:
            yield text.encode()
        else:
            try:
                yield bytes([alphabet[character] for character in text])
            except KeyError as error:
                raise ModelFileError(
                    source, f"has the token {text!r}: {error} stands for no byte"
                ) from None
