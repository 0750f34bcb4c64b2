"""Turns sampled ids into what a client is sent, and knows when the answer ends.

Both daemons use it: prefilld for the first token, decoded for the rest.  The rules:

- Ids leave only with their whole text, and text only with its ids.  While the answer runs, what
  was delivered is always `ids` and exactly the text of those ids, so a client that lost its
  connection resumes behind the last id it has and no text is lost or doubled.
- So ids wait while their text is half a character, or may be the beginning of a stop string.
- A stop id ends the answer.  It was sampled, so it is delivered; it gives no text.
- A stop string ends the answer.  The text ends before it; all ids sampled so far are delivered.
- At `max_tokens` the answer ends, with all ids, and U+FFFD for a character that stayed incomplete.
- The first `min_tokens` ids end nothing: their text is not searched for stop strings.

Nothing here but the ids decides, so whoever has the sampled ids can rebuild the state (`replay`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shared.model.detokenizer import Detokenizer
from shared.model.stops import StopMatcher, StopResult

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be sent to the client now."""

    index: int
    """Place of `ids[0]` in the answer, counted from 0; of the next id when there are none."""
    ids: list[int]
    text: str
    finish: FinishReason | None
    """Why the answer ended with this piece; None while it goes on."""

    @property
    def is_empty(self) -> bool:
        """There is nothing to send: everything waits for its text."""
        return not self.ids and self.finish is None


class _Mark(NamedTuple):
    """A place to cut: the first `num_ids` ids are exactly the first `num_characters` characters."""

    num_ids: int
    num_characters: int


class AnswerAssembler:
    """Assembles one answer, id by id.

    Args:
        token_bytes: What a token adds to the text, such as `Tokenizer.token_bytes`.
        max_tokens: The answer ends with this many ids, counting replayed ones; at least 1.
        min_tokens: Ids that end nothing, counting replayed ones; at most `max_tokens`.
        stop_ids: Ids that end the answer: the model's own (unless they are ignored) and the
            request's.
        stop_strings: Texts that end the answer, none of them empty.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        stop_ids: Set[int] = frozenset(),
        stop_strings: Iterable[str] = (),
    ) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopMatcher(stop_strings)
        self._max_tokens, self._min_tokens, self._stop_ids = max_tokens, min_tokens, stop_ids
        self._num_released = 0  # ids at a mark that was passed
        self._floor = 0  # ids below are with the client, released or not
        self._ids: list[int] = []  # sampled, not released
        self._text = ""  # certain, and behind the text of the last id released
        self._num_certain = 0  # characters that no stop string can take back, released or not
        self._marks: deque[_Mark] = deque()  # those not passed yet, in order
        self._finish: FinishReason | None = None

    @property
    def num_delivered(self) -> int:
        """How many ids the client has, once it has every piece returned so far."""
        return max(self._num_released, self._floor)

    @property
    def num_sampled(self) -> int:
        """How many ids were taken, delivered or not."""
        return self._num_released + len(self._ids)

    @property
    def finish(self) -> FinishReason | None:
        """Why the answer ended; None while it goes on."""
        return self._finish

    def push(self, token_id: int) -> Piece:
        """Take the next sampled id; return what may leave now.  Not after the answer's end."""
        assert self._finish is None, "an id was sampled behind the answer's end"
        self._ids.append(token_id)
        if token_id in self._stop_ids and self.num_sampled > self._min_tokens:
            self._end("stop")
        else:
            self._take(self._detokenizer.push(token_id))
            if self._finish is None and self.num_sampled >= self._max_tokens:
                self._end("length")
        return self._release()

    def replay(self, ids: Sequence[int], *, num_delivered: int) -> Piece:
        """Bring a fresh assembler to where another one was, or to where a client is.

        Args:
            ids: All ids sampled so far, from the answer's beginning.  What stands behind the
                answer's end is left out.
            num_delivered: How many of them the client has, with their text.

        Returns:
            What may leave now and has not: without ids when both arguments come from another
            assembler.  Its `finish` tells that `ids` were a whole answer already.

        Raises:
            ValueError: More ids were delivered than there are.
        """
        assert self.num_sampled == 0, "replay needs a fresh assembler"
        if num_delivered > len(ids):
            raise ValueError(f"{num_delivered} ids were delivered, but there are {len(ids)}")
        self._floor = num_delivered
        missed_ids: list[int] = []
        texts: list[str] = []
        for token_id in ids:
            piece = self.push(token_id)
            missed_ids += piece.ids
            texts.append(piece.text)
            if piece.finish is not None:
                break
        index = self.num_delivered - len(missed_ids)
        return Piece(index, missed_ids, "".join(texts), self._finish)

    def _take(self, text: str) -> None:
        """Add text to what waits, and mark the place if ids and text are level there."""
        can_stop = self.num_sampled > self._min_tokens
        result = self._stops.push(text) if can_stop else StopResult(text, None)
        self._keep(result.text)
        if result.matched is not None:
            self._finish = "stop"
        elif self._detokenizer.is_complete:
            num_characters = self._num_certain + self._stops.num_held
            self._marks.append(_Mark(self.num_sampled, num_characters))

    def _end(self, reason: FinishReason) -> None:
        """End the answer; a stop string that its very last character completes still counts."""
        self._take(self._detokenizer.finish())
        if self._finish is None:
            self._keep(self._stops.finish())
            self._finish = reason

    def _keep(self, text: str) -> None:
        self._text += text
        self._num_certain += len(text)

    def _release(self) -> Piece:
        """Return what lies before the last mark that the certain text reaches; all at the end."""
        mark = _Mark(self._num_released, self._num_certain - len(self._text))
        while self._marks and self._marks[0].num_characters <= self._num_certain:
            mark = self._marks.popleft()
        if self._finish is not None:
            mark = _Mark(self.num_sampled, self._num_certain)
        index = self.num_delivered
        num_ids = mark.num_ids - self._num_released
        num_characters = len(self._text) - (self._num_certain - mark.num_characters)
        ids, self._ids = self._ids[:num_ids], self._ids[num_ids:]
        text, self._text = self._text[:num_characters], self._text[num_characters:]
        self._num_released = mark.num_ids
        if mark.num_ids <= index:  # nothing, or only what the client has
            return Piece(index, [], "", self._finish)
        return Piece(index, ids[index - mark.num_ids :], text, self._finish)
