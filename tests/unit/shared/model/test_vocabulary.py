"""The vocabulary's token types."""

from __future__ import annotations

import gguf

from shared.model.vocabulary import TokenType


def test_token_types_are_numbered_as_the_file_format_does() -> None:
    """A file stores the number, so both tables must agree."""
    assert {kind.name: kind.value for kind in TokenType} == {
        kind.name: kind.value for kind in gguf.TokenType
    }
