"""Text to token ids and back: a byte-level BPE over a model's own vocabulary.

The `tokenizers` library does the work; here is decided which pipeline a file's `pre` name stands
for.  A wrong guess would split text slightly differently than in training and nobody would see
it, so a name that is not in `PRE_TOKENIZERS` is refused.

text -> ids -> text is the identity, when control tokens are kept.  Vocabularies may lack bytes
(SmolLM2 has no token for U+0004, nor for the planes of U+40000 to U+BFFFF); the library drops
those in silence, so here a text that has one is refused instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shared.model.errors import ModelFileError, PromptError, PromptTooLargeError
from shared.model.gguf_model import UNSUPPORTED_HINT
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


class Tokenizer:
    """The tokenizer of one model.  Immutable; any thread may use it.

    Args:
        vocabulary: What the model's file says.
        source: The file, for messages.

    Raises:
        ModelFileError: The splitting rule is unknown, or the vocabulary contradicts itself.
    """

    def __init__(self, vocabulary: Vocabulary, *, source: Path) -> None:
        if vocabulary.pre not in PRE_TOKENIZERS:
            known = ", ".join(sorted(PRE_TOKENIZERS))
            raise ModelFileError(
                source,
                f"splits text by the rule {vocabulary.pre!r} (tokenizer.ggml.pre); "
                f"known are: {known}",
                hint=UNSUPPORTED_HINT,
            )
        self._bos_id = vocabulary.bos_id if vocabulary.add_bos else None
        self._library = _build(vocabulary, source)
        self._texts = vocabulary.tokens
        self._bytes = tuple(_token_bytes(vocabulary, source))
        self._max_token_bytes = max(
            len(data) or len(text.encode())
            for data, text in zip(self._bytes, self._texts, strict=True)
        )
        texts = set(self._texts)
        self._missing_bytes = bytes(
            byte for character, byte in byte_alphabet().items() if character not in texts
        )

    @property
    def vocab_size(self) -> int:
        """Number of token ids; valid ones are below it."""
        return len(self._texts)

    def encode(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the token ids of a text, behind the `bos` token where the model wants one.

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
        if self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)  # unless the chat template wrote it already
        return ids

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
