"""Token ids to text, one at a time, never half a character.

A token is some bytes, and a character's bytes may lie in several tokens.  Whatever the ids, the
pieces joined are what decoding them all at once gives: bytes that can no longer become a
character come out as U+FFFD, as soon as that is certain.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one answer.

    Args:
        token_bytes: Gives what a token adds to the text, such as `Tokenizer.token_bytes`.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = _UTF8("replace")

    @property
    def is_complete(self) -> bool:
        """No bytes are held: the text so far is all the text of the ids so far."""
        return not self._decoder.getstate()[0]

    def push(self, token_id: int) -> str:
        """Take one more token; return the text that is complete now, often "" or one word."""
        return self._decoder.decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """End the text; return U+FFFD for a character that was never completed, else ""."""
        return self._decoder.decode(b"", final=True)
