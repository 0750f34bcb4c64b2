"""A conversation: its turns, how it is written to a file, and how it is read again.  Pure.

A file holds one JSON object, {"kvpair_chat": 1, "messages": [{"role": …, "content": …}, …]}, and a
system message comes first where there is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec

from protocol.limits import MAX_MESSAGES
from protocol.messages import ChatMessage
from shared.errors import KvpairError

FORMAT = 1
"""Of the file; a later one may say more."""

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read: as much as any daemon can be configured to take."""


class ConversationError(KvpairError):
    """A file is no conversation."""


@dataclass(slots=True)
class Conversation:
    """What was said so far."""

    system: str | None = None
    turns: list[ChatMessage] = field(default_factory=list)
    """User and assistant, one after the other, the user's first."""

    def asking(self, text: str) -> list[ChatMessage]:
        """Return the messages of a request that adds a question; nothing is changed."""
        return [*self._messages(), ChatMessage(role="user", content=text)]

    def take(self, question: str, answer: str) -> None:
        """Add a question and its answer."""
        self.turns += [
            ChatMessage(role="user", content=question),
            ChatMessage(role="assistant", content=answer),
        ]

    def reset(self) -> None:
        """Forget every turn; the system message stays."""
        self.turns.clear()

    def to_json(self) -> str:
        """Return the file's text."""
        body = {"kvpair_chat": FORMAT, "messages": msgspec.to_builtins(self._messages())}
        return json.dumps(body, ensure_ascii=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> Conversation:
        """Return the conversation in a file's bytes.

        Raises:
            ConversationError: They are none; the text says what is wrong.
        """
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ConversationError(f"is no JSON: {' '.join(str(error).split())}") from error
        if not isinstance(body, dict) or body.get("kvpair_chat") != FORMAT:
            raise ConversationError("is no conversation that `/save` wrote")
        try:
            messages = msgspec.convert(body.get("messages"), list[ChatMessage])
        except msgspec.ValidationError as error:
            raise ConversationError(f"has messages that are none: {error}") from error
        if len(messages) > MAX_MESSAGES:
            raise ConversationError(f"has more than {MAX_MESSAGES} messages")
        system = None
        if messages and messages[0].role == "system":
            system, messages = messages[0].content, messages[1:]
        roles = [message.role for message in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise ConversationError("has messages that are not turns of user and assistant")
        return cls(system, messages)

    def _messages(self) -> list[ChatMessage]:
        before = [] if self.system is None else [ChatMessage(role="system", content=self.system)]
        return [*before, *self.turns]
