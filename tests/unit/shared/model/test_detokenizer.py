"""Incremental decoding, held against decoding all at once."""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from shared.model.detokenizer import Detokenizer

# Tokens as a byte-level vocabulary has them: words, halves of characters, bytes that are none.
PIECES = (b"", b"a", b" the", "é".encode(), "€".encode(), b"\xe2", b"\x82", b"\xac", b"\xf0\x9f")
PIECES += (b"\x98\x80", b"\xff", b"\xc0", b"\xed\xa0", b"\x80b", b"\xe2\x82")


def decoder() -> Detokenizer:
    return Detokenizer(PIECES.__getitem__)


def push_all(detokenizer: Detokenizer, *pieces: bytes) -> list[str]:
    return [detokenizer.push(PIECES.index(piece)) for piece in pieces]


def test_a_character_comes_out_with_its_last_byte() -> None:
    """Never half a character, and never later than its last token."""
    assert push_all(decoder(), b"\xe2", b"\x82", b"\xac", b"a") == ["", "", "€", "a"]


def test_bytes_that_became_hopeless_come_out_at_once() -> None:
    """A letter behind half a character shows that the rest will not come."""
    assert push_all(decoder(), b"a", b"\xe2\x82", b"a") == ["a", "", "\ufffda"]


def test_completeness_tells_whether_bytes_are_held() -> None:
    """Ids may leave only when none are."""
    detokenizer = decoder()
    assert detokenizer.is_complete
    push_all(detokenizer, b"a", b"\xf0\x9f")
    assert not detokenizer.is_complete
    push_all(detokenizer, b"")  # a control token decides nothing
    assert not detokenizer.is_complete
    push_all(detokenizer, b"\x98\x80")
    assert detokenizer.is_complete


def test_the_end_turns_an_incomplete_character_into_the_replacement() -> None:
    """As decoding the whole does; an answer may end anywhere."""
    detokenizer = decoder()
    push_all(detokenizer, b"\xe2\x82")
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.is_complete
    assert detokenizer.finish() == ""


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_the_pieces_joined_are_the_whole_decoded(ids: list[int]) -> None:
    """For any ids at all: a model may sample any token after any other."""
    detokenizer = decoder()
    pieces = [detokenizer.push(token_id) for token_id in ids]
    whole = b"".join(PIECES[token_id] for token_id in ids)
    assert "".join([*pieces, detokenizer.finish()]) == whole.decode(errors="replace")


@given(ids=st.lists(st.integers(0, len(PIECES) - 1), max_size=40))
def test_what_came_out_is_never_taken_back(ids: list[int]) -> None:
    """At a complete place the text so far is exactly the text of the ids so far."""
    detokenizer, text, data = decoder(), "", b""
    for token_id in ids:
        text += detokenizer.push(token_id)
        data += PIECES[token_id]
        if detokenizer.is_complete:
            assert text == data.decode(errors="replace")
        else:
            held = len(data) - len(codecs.encode(data.decode(errors="ignore")))
            assert held > 0
