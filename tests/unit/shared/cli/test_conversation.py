"""A conversation and its file."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import ChatMessage
from shared.cli.conversation import Conversation, ConversationError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def roles(messages: list[ChatMessage]) -> list[str]:
    return [message.role for message in messages]


def test_a_question_comes_behind_everything_that_was_said() -> None:
    """And changes nothing until its answer is there."""
    conversation = Conversation(system="be brief")
    conversation.take("a", "b")
    asked = conversation.asking("c")
    assert roles(asked) == ["system", "user", "assistant", "user"]
    assert asked[-1].content == "c"
    assert len(conversation.turns) == 2


def test_a_reset_keeps_the_system_message() -> None:
    conversation = Conversation(system="be brief")
    conversation.take("a", "b")
    conversation.reset()
    assert roles(conversation.asking("c")) == ["system", "user"]


@given(system=st.none() | texts, turns=st.lists(st.tuples(texts, texts), max_size=4))
def test_a_saved_conversation_is_the_same_when_it_is_read(
    system: str | None, turns: list[tuple[str, str]]
) -> None:
    conversation = Conversation(system=system)
    for question, answer in turns:
        conversation.take(question, answer)
    assert Conversation.from_json(conversation.to_json().encode()) == conversation


def body(*messages: tuple[str, str]) -> bytes:
    listed = [{"role": role, "content": content} for role, content in messages]
    return json.dumps({"kvpair_chat": 1, "messages": listed}).encode()


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"{", "is no JSON"),
        (b"\xff", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "is no conversation that `/save` wrote"),
        (b'{"kvpair_chat": 2}', "is no conversation that `/save` wrote"),
        (b'{"kvpair_chat": 1}', "has messages that are none"),
        (b'{"kvpair_chat": 1, "messages": [{"role": "user"}]}', "missing required field `content`"),
        (body(("user", "a")), "are not turns of user and assistant"),
        (body(("assistant", "a"), ("user", "b")), "are not turns of user and assistant"),
        (body(("user", "a"), ("system", "b")), "are not turns of user and assistant"),
        (body(*[("user", ""), ("assistant", "")] * 2049), "has more than 4096 messages"),
    ],
)
def test_what_is_no_conversation_is_refused_with_the_reason(data: bytes, fault: str) -> None:
    with pytest.raises(ConversationError, match=fault):
        Conversation.from_json(data)
