"""A set of tokens as bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.ops.errors import ShapeError
from shared.ops.token_bitmap import bitmap_bytes, pack_tokens, unpack_tokens

CPU = torch.device("cpu")


@given(vocab_size=st.integers(1, 70), data=st.data())
def test_a_set_comes_back_as_it_went(vocab_size: int, data: st.DataObject) -> None:
    """Also where the vocabulary ends inside a byte."""
    ids = data.draw(st.lists(st.integers(0, vocab_size - 1)))
    bitmap = pack_tokens(ids, vocab_size)
    assert len(bitmap) == bitmap_bytes(vocab_size)
    is_in = unpack_tokens(bitmap, vocab_size, CPU)
    assert is_in.shape == (vocab_size,)
    assert set(is_in.nonzero().flatten().tolist()) == set(ids)


def test_a_bitmap_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ShapeError, match="2 bytes is not one of 17 tokens"):
        unpack_tokens(bytes(2), 17, CPU)
