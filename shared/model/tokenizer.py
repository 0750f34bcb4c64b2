"""Text to token ids and back, over whatever tokenizer a model's files describe.

The `tokenizers` library does the work; `gguf_tokenizer.py` and `hub_tokenizer.py` bring its parts.

text -> ids -> text is the identity, when control tokens are kept and nothing was normalised.
Vocabularies may lack bytes (SmolLM2 has no token for U+0004, nor for the planes of U+40000 to
U+BFFFF); the library drops those in silence, so here a text that has one is refused instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import tokenizers

from shared.model.errors import PromptError, PromptTooLargeError

NORMALISED_SHRINKAGE = 3
"""How many times shorter a normalised text can be, in bytes: what composes shrinks most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """What a tokenizer is made of."""

    library: tokenizers.Tokenizer
    """Splits and merges; adds no special tokens of its own and cuts nothing off."""
    texts: tuple[str, ...]
    """Each token's text in the vocabulary, by id."""
    token_bytes: tuple[bytes, ...]
    """What each token adds to a text: b"" for control tokens, else UTF-8 or a part of it."""
    prefix_ids: tuple[int, ...] = ()
    """Come before every encoded text that does not begin with them."""
    suffix_ids: tuple[int, ...] = ()
    """Come behind every encoded text."""
    missing_bytes: bytes = b""
    """Bytes without a token."""
    unknown_id: int | None = None
    """What the library writes for text without tokens, where it does."""


class Tokenizer:
    """The tokenizer of one model.  Immutable; any thread may use it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._library = parts.library
        self._texts, self._bytes = parts.texts, parts.token_bytes
        self._missing_bytes = parts.missing_bytes
        longest = max(
            len(data) or len(text.encode())
            for data, text in zip(self._bytes, self._texts, strict=True)
        )
        shrinkage = 1 if parts.library.normalizer is None else NORMALISED_SHRINKAGE
        self._max_token_bytes = longest * shrinkage

    @property
    def vocab_size(self) -> int:
        """Number of token ids; valid ones are below it."""
        return len(self._texts)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text, between the tokens that the model wants around one.

        The texts of control tokens (`<|im_end|>`) become those tokens, since chat templates
        write them.

        The longest text that an 8,192-token context lets through takes about a second, without
        holding the interpreter: an event loop should call this on another thread.

        Args:
            text: Any text.
            max_tokens: The most that the caller can use.  A text that must come out longer is
                refused without being tokenised; one that might fit is tokenised whole, so the
                result can still be longer than this.

        Raises:
            PromptTooLargeError: Even in the vocabulary's longest tokens, `text` would be more
                than `max_tokens`.
            PromptError: A character is a lone surrogate, or has no tokens in this vocabulary.
        """
        try:
            utf8 = text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"character {error.start} of the text is a lone surrogate, which is not Unicode"
            ) from None
        num_bytes = len(utf8)
        if max_tokens is not None and num_bytes > max_tokens * self._max_token_bytes:
            least_tokens = -(-num_bytes // self._max_token_bytes)
            raise PromptTooLargeError(
                f"a text of {num_bytes} bytes is at least {least_tokens} tokens; "
                f"{max_tokens} is the most here"
            )
        if len(utf8.translate(None, self._missing_bytes)) != num_bytes:
            raise self._no_token(text)
        # The batch call lets other threads run meanwhile; the single one holds the interpreter.
        ids = self._library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        unknown_id = self._parts.unknown_id
        if unknown_id in ids and self._texts[unknown_id] not in text:
            raise PromptError("a part of the text has no token in this model", hint="leave it out")
        prefix = list(self._parts.prefix_ids)
        if ids[: len(prefix)] == prefix:  # the chat template wrote it already
            prefix = []
        return [*prefix, *ids, *self._parts.suffix_ids]

    def decode(self, ids: Iterable[int], *, keep_control: bool = False) -> str:
        """Return the text of token ids; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: Token ids, each below `vocab_size`.
            keep_control: Write out control tokens, which otherwise have no text.
        """
        if keep_control:
            pieces = (self._bytes[i] or self._texts[i].encode() for i in ids)
        else:
            pieces = (self._bytes[i] for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token adds to a text: b"" for control tokens, else UTF-8 or a part."""
        return self._bytes[token_id]

    def _no_token(self, text: str) -> PromptError:
        missing = set(self._missing_bytes)
        position, character = next(
            (position, character)
            for position, character in enumerate(text)
            if not missing.isdisjoint(character.encode())
        )
        return PromptError(
            f"character {position} of the text, U+{ord(character):04X}, has no token in this model",
            hint="leave it out",
        )


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a token text stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are written
    as the characters from U+0100 on, so that no token text has a space or a control character.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }
