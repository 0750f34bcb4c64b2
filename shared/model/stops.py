"""Finds the first stop string in a text that arrives in pieces.

Text that could be the beginning of a stop string is held back until it is decided, and no other
text is.  "First" is the one that is complete first, and of those that end together the longest,
so the result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StopResult(NamedTuple):
    """What became certain with one more piece of text."""

    text: str
    """Text that is before any stop string, and was not returned before."""
    matched: str | None
    """The stop string that came next, which ends the text; None when there was none so far."""


class StopMatcher:
    """Watches one text for stop strings.

    Each string is followed by its own Knuth-Morris-Pratt state, so a character costs one step a
    string, however long the strings are and however often they nearly match.

    Args:
        stop_strings: The strings, none of them empty.

    Raises:
        ValueError: A stop string is empty: it would stand before every text.
    """

    def __init__(self, stop_strings: Iterable[str]) -> None:
        self._followers = [_Follower(string) for string in stop_strings]
        self._held = ""

    @property
    def num_held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> StopResult:
        """Take one more piece of text.  Not to be called again after a match."""
        if not self._followers:
            return StopResult(text, None)
        seen, self._held = self._held + text, ""
        for end in range(len(seen) - len(text) + 1, len(seen) + 1):
            character = seen[end - 1]
            # A list, not a generator: every follower must take every character.
            complete = [f.string for f in self._followers if f.advance(character)]
            if complete:
                matched = max(complete, key=len)
                return StopResult(seen[: end - len(matched)], matched)
        num_free = len(seen) - max(f.num_matched for f in self._followers)
        self._held = seen[num_free:]
        return StopResult(seen[:num_free], None)

    def finish(self) -> str:
        """End the text; return what was held back, since no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Follower:
    """How much of one string the text so far ends with."""

    __slots__ = ("_borders", "num_matched", "string")

    def __init__(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string is empty")
        self.string = string
        self.num_matched = 0
        # borders[n]: the longest proper prefix of string[:n] that is also its suffix.
        self._borders = [0] * (len(string) + 1)
        border = 0
        for length in range(2, len(string) + 1):
            border = self._step(border, string[length - 1])
            self._borders[length] = border

    def advance(self, character: str) -> bool:
        """Take one character; tell whether the string is complete with it."""
        self.num_matched = self._step(self.num_matched, character)
        return self.num_matched == len(self.string)

    def _step(self, num_matched: int, character: str) -> int:
        while num_matched and self.string[num_matched] != character:
            num_matched = self._borders[num_matched]
        return num_matched + 1 if self.string[num_matched] == character else 0
