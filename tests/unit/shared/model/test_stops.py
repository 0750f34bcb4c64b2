"""Stop strings in a text that arrives in pieces, held against the definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.model.stops import StopMatcher, StopResult

# Two letters make overlaps, borders and near misses common.
letters = st.text(alphabet="ab", max_size=30)
strings = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def definition(text: str, stop_strings: list[str]) -> StopResult:
    """Return the text before the stop string that is complete first, the longest of equals."""
    for end in range(1, len(text) + 1):
        complete = [string for string in stop_strings if text[:end].endswith(string)]
        if complete:
            matched = max(complete, key=len)
            return StopResult(text[: end - len(matched)], matched)
    return StopResult(text, None)


def run(stop_strings: list[str], pieces: list[str]) -> StopResult:
    matcher, text = StopMatcher(stop_strings), ""
    for piece in pieces:
        result = matcher.push(piece)
        text += result.text
        if result.matched is not None:
            return StopResult(text, result.matched)
    return StopResult(text + matcher.finish(), None)


def test_text_that_may_begin_a_stop_string_waits() -> None:
    """Once sent, it could not be taken back."""
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.push("Paris.\n") == StopResult("Paris.", None)
    assert matcher.num_held == 1
    assert matcher.push("\nUs") == StopResult("", None)
    assert matcher.push("er: hi") == StopResult("", "\n\nUser:")


def test_text_that_turned_out_harmless_follows() -> None:
    """A near miss only delays."""
    matcher = StopMatcher(["###"])
    assert matcher.push("a##") == StopResult("a", None)
    assert matcher.push("b") == StopResult("##b", None)
    assert matcher.num_held == 0


def test_the_end_gives_back_what_was_held() -> None:
    """No stop string came of it."""
    matcher = StopMatcher(["###"])
    matcher.push("a##")
    assert matcher.finish() == "##"
    assert matcher.finish() == ""


def test_without_stop_strings_nothing_waits() -> None:
    """The usual case costs nothing."""
    assert StopMatcher([]).push("text") == StopResult("text", None)


def test_the_string_that_is_complete_first_wins() -> None:
    """Waiting for a longer one would sample tokens that nobody asked for."""
    assert run(["abcd", "c"], ["abcd"]) == StopResult("ab", "c")


def test_of_strings_that_end_together_the_longest_wins() -> None:
    """It began first, so the text ends before it."""
    assert run(["b", "ab"], ["aab"]) == StopResult("a", "ab")


def test_an_empty_stop_string_is_refused() -> None:
    """It stands before every text, so every answer would be empty."""
    with pytest.raises(ValueError, match="a stop string is empty"):
        StopMatcher(["a", ""])


@given(text=letters, stop_strings=strings, cuts=st.lists(st.integers(0, 30)))
@example(text="aab", stop_strings=["ab"], cuts=[1, 2])
@example(text="abaabab", stop_strings=["abab"], cuts=[])
def test_any_cut_of_the_text_gives_what_the_definition_says(
    text: str, stop_strings: list[str], cuts: list[int]
) -> None:
    """Where one token ends and the next begins must not change an answer."""
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(edges)]
    assert run(stop_strings, pieces) == definition(text, stop_strings)


@given(text=letters, stop_strings=strings)
def test_only_the_beginning_of_a_stop_string_waits(text: str, stop_strings: list[str]) -> None:
    """Holding back more would delay text that is certain."""
    matcher = StopMatcher(stop_strings)
    result = matcher.push(text)
    if result.matched is None:
        held = text[len(result.text) :]
        beginnings = {string[:n] for string in stop_strings for n in range(len(string))} | {""}
        longest = max((b for b in beginnings if text.endswith(b)), key=len)
        assert held == longest


def test_long_strings_that_nearly_match_cost_no_more() -> None:
    """Sixteen strings of 1,024 characters, each missed by its last one, over a long answer.

    No time is measured: a search from scratch at every character would run into the suite's limit.
    """
    stop_strings = ["a" * (1008 + n) + "b" for n in range(16)]
    matcher = StopMatcher(stop_strings)
    text = "".join(matcher.push("aaaa").text for _ in range(10_000))
    assert len(text) + matcher.num_held == 40_000
    assert matcher.push("b").matched == stop_strings[-1]
