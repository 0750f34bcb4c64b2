"""Builds the tokenizer of a Hugging Face directory from its `tokenizer.json`.

The library reads the file and does what it says; here is found out what each token adds to a text,
which the library only tells for whole answers.  Two ways to write a token are known, byte-level
(GPT-2's alphabet) and SentencePiece's (`▁` for a space, `<0x0A>` for a byte); a file that decodes
by another is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from shared.model.errors import ModelFileError
from shared.model.json_file import JsonFields, read_json, read_json_if_there
from shared.model.tokenizer import Tokenizer, TokenizerParts, byte_alphabet

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")

PROBE = "a"
"""A text that every vocabulary has, to see what a file puts around texts."""


def hub_tokenizer(folder: Path, *, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of the model in a directory.

    Args:
        folder: The directory.
        vocab_size: The model's; it may have more tokens than the tokenizer, which have no text.

    Raises:
        ModelFileError: The file is missing, damaged, decodes in a way that is not known, or has
            tokens that the model lacks.
    """
    path = folder / "tokenizer.json"
    source = read_json(path)
    library = _library(source)
    texts = [library.id_to_token(token_id) or "" for token_id in range(vocab_size)]
    largest = max(library.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise source.fail(f"has the token id {largest}; the model has {vocab_size} tokens")
    in_bytes, is_byte_level = _way_of_writing(source)
    token_bytes = [in_bytes(text) for text in texts]
    for token_id, added in library.get_added_tokens_decoder().items():
        token_bytes[token_id] = b"" if added.special else added.content.encode()
    prefix_ids, suffix_ids = _around(library, folder)
    known = set(texts)
    return Tokenizer(
        TokenizerParts(
            library=library,
            texts=tuple(texts),
            token_bytes=tuple(token_bytes),
            prefix_ids=prefix_ids,
            suffix_ids=suffix_ids,
            missing_bytes=bytes(
                byte
                for character, byte in byte_alphabet().items()
                if is_byte_level and character not in known
            ),
            unknown_id=_unknown_id(library),
        )
    )


def _library(source: JsonFields) -> tokenizers.Tokenizer:
    try:
        library = tokenizers.Tokenizer.from_file(str(source.path))
    except Exception as error:  # the library raises nothing narrower
        fault = " ".join(str(error).split())
        raise ModelFileError(source.path, f"is no tokenizer that can be read: {fault}") from error
    library.no_truncation()
    library.no_padding()
    return library


def _way_of_writing(source: JsonFields) -> tuple[Callable[[str], bytes], bool]:
    """Return what turns a token's text into bytes, and whether that is GPT-2's alphabet."""
    kinds = _decoder_kinds(source.values.get("decoder"))
    if "ByteLevel" in kinds:
        return _byte_level(), True
    if {"ByteFallback", "Metaspace"} & set(kinds):
        return _sentence_piece, False
    raise source.fail(
        f"decodes by {', '.join(kinds) or 'nothing'}; known are: ByteLevel, ByteFallback, Metaspace"
    )


def _decoder_kinds(decoder: Any) -> list[str]:  # noqa: ANN401 - JSON
    if not isinstance(decoder, dict):
        return []
    parts = decoder.get("decoders")
    if isinstance(parts, list):
        return [kind for part in parts for kind in _decoder_kinds(part)]
    return [str(decoder.get("type"))]


def _byte_level() -> Callable[[str], bytes]:
    alphabet = byte_alphabet()

    def in_bytes(text: str) -> bytes:
        if all(character in alphabet for character in text):
            return bytes(alphabet[character] for character in text)
        return text.encode()  # as the library does with what is not of the alphabet

    return in_bytes


def _sentence_piece(text: str) -> bytes:
    if found := BYTE_TOKEN.match(text):
        return bytes([int(found[1], 16)])
    return text.replace("▁", " ").encode()


def _around(library: tokenizers.Tokenizer, folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that come before and behind every text.

    `tokenizer_config.json` goes before what `tokenizer.json` says, as in transformers.
    """
    config = read_json_if_there(folder / "tokenizer_config.json")
    if "add_bos_token" in config or "add_eos_token" in config:
        return _named(library, config, "bos"), _named(library, config, "eos")
    bare = library.encode(PROBE, add_special_tokens=False).ids
    whole = library.encode(PROBE, add_special_tokens=True).ids
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return tuple(whole[:start]), tuple(whole[start + len(bare) :])
    raise ModelFileError(folder / "tokenizer.json", "changes a text by its special tokens")


def _named(library: tokenizers.Tokenizer, config: JsonFields, name: str) -> tuple[int, ...]:
    if not config.optional(f"add_{name}_token", False):
        return ()
    value = config.values.get(f"{name}_token")
    text = value.get("content") if isinstance(value, dict) else value
    token_id = library.token_to_id(text) if isinstance(text, str) else None
    if token_id is None:
        raise config.fail(f"adds a `{name}_token` to every text, but names none of its tokens")
    return (token_id,)


def _unknown_id(library: tokenizers.Tokenizer) -> int | None:
    text = getattr(library.model, "unk_token", None)
    return library.token_to_id(text) if isinstance(text, str) else None
