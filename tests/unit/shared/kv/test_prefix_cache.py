"""Tests of shared/kv/prefix_cache.py."""

from __future__ import annotations

import pytest

from shared.kv.errors import IntegrityError
from shared.kv.prefix_cache import PrefixCache

A, B, C = b"a", b"b", b"c"


def filled() -> PrefixCache:
    """Return a cache that knows blocks 1, 2 and 3, all in use."""
    cache = PrefixCache()
    for block, block_hash in enumerate((A, B, C), start=1):
        cache.add(block_hash, block)
    return cache


def test_the_longest_known_beginning_is_found() -> None:
    """What follows a gap is of no use: prefill goes from left to right."""
    cache = filled()
    assert cache.find([A, B, b"x"]) == [1, 2]
    assert cache.find([b"x", A, B]) == []
    assert cache.find([]) == []


def test_what_nobody_used_for_longest_goes_first() -> None:
    cache = filled()
    for block in (2, 3, 1):
        cache.retire(block)
    cache.use(3)
    cache.retire(3)
    assert [cache.evict() for _ in range(3)] == [2, 1, 3]
    assert (len(cache), cache.num_idle, cache.find([A])) == (0, 0, [])


def test_what_is_in_use_is_never_evicted() -> None:
    cache = filled()
    cache.retire(2)
    cache.retire(1)
    cache.use(2)
    assert (cache.is_idle(2), cache.is_idle(1)) == (False, True)
    assert cache.evict() == 1
    with pytest.raises(KeyError, match="empty"):
        cache.evict()
    assert cache.find([A]) == []
    assert cache.find([B, C]) == [2, 3]


def test_the_second_block_of_one_content_is_not_listed_and_refreshes_the_first() -> None:
    """Two prompts that begin alike and were admitted together compute it twice."""
    cache = filled()
    for block in (1, 2, 3):
        cache.retire(block)
    cache.add(A, 7)
    assert 7 not in cache
    assert cache.find([A]) == [1]
    assert [cache.evict() for _ in range(3)] == [2, 3, 1]


def test_the_books_are_checked() -> None:
    cache = filled()
    cache.retire(1)
    cache.check_integrity()
    cache.retire(9)
    with pytest.raises(IntegrityError, match=r"blocks \[9\] wait unlisted"):
        cache.check_integrity()
    cache.use(9)
    cache._hashes[2] = A
    with pytest.raises(IntegrityError, match="a block twice"):
        cache.check_integrity()
