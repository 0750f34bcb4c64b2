"""Carries one request through the loss of daemons, so that its answer is delivered exactly once.

What a failure calls for, as decided here and nowhere else:

    the stream ended early, or ERROR said that a     send the request again with `resume`: the
    daemon went away under it, or had to let go of   tokens that are here are not sent again
    it for the sake of others (`LOSS_CODES`)
    the daemon is not back yet, is behind, full or   ask again until the deadline; nothing was
    draining (only once something was lost)          begun, so it is no attempt
    anything else                                    the caller's to know

An answer is sampled from a seed and from positions, and ACCEPTED told the seed, so the rest is the
one that would have come.  No sockets, no clock: both clients ask this what to do and do it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from protocol.errors import (
    ConnectionLostError,
    InvalidMessageError,
    ListenQueueFullError,
    NoSuchSocketError,
    NotListeningError,
    ProtocolError,
    RequestError,
    SocketForbiddenError,
)
from protocol.exchange import Event, Exchange, next_attempt
from protocol.messages import Accepted, End, Generate, Message, Tokens

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_MAX_ATTEMPTS = 3
"""One for decoded, one for prefilld and one to spare; who needs more is the cause, not a victim."""

DEFAULT_RECONNECT_TIMEOUT_S = 60.0
"""A daemon that is started again listens before it has loaded its model, seconds after it died."""

DEFAULT_MAX_PREEMPTIONS = 16
"""How often an answer goes on that had to make room for others.  That is no fault of anybody's, and
each time it gets further; but a daemon that is so full for so long serves nobody by more tries."""

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
"""Pause before the next try: doubles from the first to the longest, times a random 0.5 to 1.5.

All clients of a daemon lose it at the same moment; without chance they would come back as one."""

PREEMPTED = "preempted"
"""The ERROR of an answer that had to make room for others."""

LOSS_CODES = frozenset({"prefill-lost", "draining", "internal", PREEMPTED})
"""ERRORs behind ACCEPTED that tell of a daemon's end or want of room and, where `retryable`, not of
the request."""

LATER_CODES = frozenset({"busy", "draining"})
"""ERRORs before ACCEPTED that say: not now."""

UNREACHABLE = (
    NoSuchSocketError,
    NotListeningError,
    ListenQueueFullError,
    SocketForbiddenError,
)
"""How a daemon looks that is being started again: no socket, one that the dead one left, one that
is not listened at yet, or one that has not been given to its group yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An answer broke off, and is about to be resumed."""

    attempt: int
    """Which resumption of this answer it leads to, counted from 1; preemptions count apart."""
    max_attempts: int
    num_tokens: int
    """Tokens that this stream has delivered."""
    error: ProtocolError | RequestError

    @property
    def is_preempted(self) -> bool:
        """Whether it had to make room for others, and no daemon went away."""
        return _is_preempted(self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePolicy:
    """How much a client puts up with.

    Args:
        max_attempts: How often an answer that broke off is resumed; 0 raises every loss at once.
        max_preemptions: How often beside that it is resumed where it had to make room for others.
        reconnect_timeout_s: How long after a loss to look for a daemon that takes the request.
        on_loss: Told of each loss before the answer is resumed.
    """

    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    max_preemptions: int = DEFAULT_MAX_PREEMPTIONS
    reconnect_timeout_s: float = DEFAULT_RECONNECT_TIMEOUT_S
    on_loss: Callable[[Loss], None] | None = None


DEFAULT_POLICY = ResumePolicy()


class Resumption:
    """One request from its first connection to its answer's end.

    Args:
        request: What the caller asks; it may be a resumption itself.
        policy: How much to put up with.
        chance: Returns a number from 0 to 1, another one each time.
    """

    def __init__(
        self,
        request: Generate,
        policy: ResumePolicy,
        *,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._request, self._policy, self._chance = request, policy, chance
        self._num_brought = len(request.resume.ids) if request.resume else 0
        self._exchange = Exchange(request)
        self._accepted: Accepted | None = None
        """The first ACCEPTED; the ones of later connections must say the same."""
        self._num_attempts = self._num_preemptions = 0
        self._next_pause_s = FIRST_PAUSE_S
        self.is_cancelled = False
        """Set where the caller wants no more of the answer: nothing is mended any more."""
        self._give_up_s: float | None = None
        """When to stop looking for a daemon; None while nothing is lost."""

    @property
    def num_tokens(self) -> int:
        """Tokens delivered by this stream."""
        resume = self._exchange.resume or self._request.resume
        return 0 if resume is None else len(resume.ids) - self._num_brought

    def next_exchange(self) -> Exchange:
        """Return the exchange for a new connection."""
        self._exchange = Exchange(self._request)
        return self._exchange

    def take(self, message: Message) -> Event | None:
        """Return what the caller is to see of a message: each event once.

        Raises:
            InvalidMessageError: The resumed answer is not the one that was begun.
        """
        assert isinstance(message, Accepted | Tokens | End)  # the state table: nothing else
        if not isinstance(message, Accepted):
            return message
        self._give_up_s = None
        begun, self._accepted = self._accepted, self._accepted or message
        if begun is None:
            return message
        if (message.seed, message.fingerprint) != (begun.seed, begun.fingerprint):
            raise InvalidMessageError("accepted: the resumed answer has another seed or model")
        return None

    def failed(self, error: ProtocolError | RequestError, *, now_s: float) -> float:
        """Judge a failure of the present connection, or of the attempt to make one.

        Args:
            error: What was raised.
            now_s: Monotonic time.

        Returns:
            How many seconds to wait before the next connection.

        Raises:
            ProtocolError: As given, where it cannot be mended; a `ConnectionLostError` from it
                where no daemon came back in time.
            RequestError: As given.
        """
        if self.is_cancelled:
            raise error
        if self._is_loss(error):
            self._lose(error, now_s)
        elif not self._is_passing(error):
            raise error
        assert self._give_up_s is not None  # something is lost, or the error would have been raised
        pause_s = self._pause_s(error)
        if now_s + pause_s > self._give_up_s:
            timeout_s = self._policy.reconnect_timeout_s
            raise self.lost(f"nobody went on with it within {timeout_s:g} s: {error}") from error
        return pause_s

    def lost(self, detail: str) -> ConnectionLostError:
        """Return the error that says that the answer stays as it is, and how to go on later."""
        return ConnectionLostError(
            f"the daemon went away before the answer was whole; tokens delivered: "
            f"{self.num_tokens}; {detail}",
            num_tokens=self.num_tokens,
            resume=self._request.resume,
        )

    def _is_loss(self, error: ProtocolError | RequestError) -> bool:
        if isinstance(error, RequestError):
            is_begun = self._exchange.resume is not None
            return is_begun and error.retryable and error.code in LOSS_CODES
        return isinstance(error, ConnectionLostError)

    def _is_passing(self, error: ProtocolError | RequestError) -> bool:
        """Whether an error only says that there is no daemon for the request yet."""
        if self._give_up_s is None:
            return False
        if isinstance(error, RequestError):
            return error.retryable and error.code in LATER_CODES
        return isinstance(error, UNREACHABLE)

    def _pause_s(self, error: ProtocolError | RequestError) -> float:
        asked_s = error.retry_after_ms / 1000 if isinstance(error, RequestError) else 0.0
        pause_s = self._next_pause_s
        self._next_pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        return max(pause_s * (0.5 + self._chance()), asked_s * (1 + self._chance()))

    def _lose(self, error: ProtocolError | RequestError, now_s: float) -> None:
        """Turn the request into one that goes on behind what was delivered, or raise the loss."""
        resume = self._exchange.resume
        if resume is not None and self._accepted is not None:
            # Under the id that it was given: prefilld counts what becomes of it.
            self._request = msgspec.structs.replace(
                self._request, id=self._accepted.id, resume=resume
            )
        elif self._request.resume is not None:  # it was not even accepted again
            resume = next_attempt(self._request.resume, self._request.resume.ids)
            self._request = msgspec.structs.replace(self._request, resume=resume)
        attempt, max_attempts = self._count(error)
        self._next_pause_s = FIRST_PAUSE_S
        if self._give_up_s is None:
            self._give_up_s = now_s + self._policy.reconnect_timeout_s
        if self._policy.on_loss is not None:
            self._policy.on_loss(
                Loss(
                    attempt=attempt,
                    max_attempts=max_attempts,
                    num_tokens=self.num_tokens,
                    error=error,
                )
            )

    def _count(self, error: ProtocolError | RequestError) -> tuple[int, int]:
        """Return which attempt a loss leads to, of how many, or raise what is one too many."""
        policy = self._policy
        if _is_preempted(error) and policy.max_attempts:
            if self._num_preemptions >= policy.max_preemptions:
                raise self._final(error)
            self._num_preemptions += 1
            return self._num_preemptions, policy.max_preemptions
        if self._num_attempts >= policy.max_attempts:
            raise self._final(error)
        self._num_attempts += 1
        return self._num_attempts, policy.max_attempts

    def _final(self, error: ProtocolError | RequestError) -> ProtocolError | RequestError:
        """Return a loss that tells of every connection's tokens, and not of the last one's only."""
        if not isinstance(error, ConnectionLostError) or self._num_attempts == 0:
            return error
        return self.lost(f"it was resumed {self._num_attempts} times")


def _is_preempted(error: ProtocolError | RequestError) -> bool:
    return isinstance(error, RequestError) and error.code == PREEMPTED
