"""An answer, assembled: what leaves when, and why it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.model.answer import AnswerAssembler, FinishReason, Piece
from shared.model.hub_tokenizer import hub_tokenizer
from tests.support.tiny_hub import TEXTS, write_tokenizer

if TYPE_CHECKING:
    from shared.model.tokenizer import Tokenizer

PIECES = ("a", "b", " the", "ab", "€", "")
BYTES = (*(piece.encode() for piece in PIECES), b"\xe2", b"\x82", b"\xac", b"\xff")
A, B, THE, AB, EURO, CONTROL, E2, X82, AC, XFF = range(len(BYTES))

ids_lists = st.lists(st.integers(0, len(BYTES) - 1), min_size=1, max_size=25)
stop_strings_lists = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3)
stop_id_sets = st.frozensets(st.integers(0, len(BYTES) - 1), max_size=2)


def assembler(
    *,
    max_tokens: int = 100,
    min_tokens: int = 0,
    stop_ids: frozenset[int] = frozenset(),
    stop: tuple[str, ...] = (),
) -> AnswerAssembler:
    return AnswerAssembler(
        BYTES.__getitem__,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_ids=stop_ids,
        stop_strings=stop,
    )


def push_all(answer: AnswerAssembler, ids: list[int]) -> list[Piece]:
    pieces: list[Piece] = []
    for token_id in ids:
        pieces.append(answer.push(token_id))
        if pieces[-1].finish is not None:
            break
    return pieces


def decode(ids: list[int]) -> str:
    return b"".join(BYTES[token_id] for token_id in ids).decode(errors="replace")


# --- what leaves when ------------------------------------------------------------------------


def test_a_whole_token_leaves_at_once() -> None:
    """The usual case: one id, one word, one piece."""
    answer = assembler()
    assert answer.push(A) == Piece(0, [A], "a", None)
    assert answer.push(THE) == Piece(1, [THE], " the", None)
    assert (answer.num_delivered, answer.num_sampled) == (2, 2)


def test_ids_of_half_a_character_wait_for_the_other_half() -> None:
    """A client that resumes behind an id must have all of its text."""
    answer = assembler()
    assert push_all(answer, [E2, X82]) == [Piece(0, [], "", None)] * 2
    assert (answer.num_delivered, answer.num_sampled) == (0, 2)
    assert answer.push(AC) == Piece(0, [E2, X82, AC], "€", None)


def test_ids_of_a_possible_stop_string_wait() -> None:
    """And only those: what came before them leaves."""
    answer = assembler(stop=("abab",))
    assert answer.push(THE) == Piece(0, [THE], " the", None)
    assert answer.push(AB).is_empty
    assert answer.push(A).is_empty
    assert answer.push(A) == Piece(1, [AB, A], "aba", None)  # the last "a" may yet begin one
    assert answer.push(THE) == Piece(3, [A, THE], "a the", None)


def test_text_that_is_certain_waits_for_the_rest_of_its_token() -> None:
    """Text leaves only with its ids, else a resumed answer would say it twice."""
    answer = assembler(stop=("bb",))
    assert answer.push(AB).is_empty  # "a" is certain, "b" is not
    assert answer.push(A) == Piece(0, [AB, A], "aba", None)


def test_a_control_token_leaves_without_text() -> None:
    """It was sampled, so the client gets its id."""
    assert assembler().push(CONTROL) == Piece(0, [CONTROL], "", None)


# --- why it ends -----------------------------------------------------------------------------


def test_a_stop_id_is_delivered_without_its_text() -> None:
    """The client counts ids; the text ends before it."""
    answer = assembler(stop_ids=frozenset({B}))
    assert push_all(answer, [A, B]) == [Piece(0, [A], "a", None), Piece(1, [B], "", "stop")]
    assert answer.finish == "stop"


def test_a_stop_string_ends_the_text_before_it() -> None:
    """All ids sampled so far are delivered: they were sampled and are paid for."""
    answer = assembler(stop=("b the",))
    assert push_all(answer, [A, AB, THE])[-1] == Piece(1, [AB, THE], "a", "stop")


def test_max_tokens_ends_with_all_that_waited() -> None:
    """Half a character comes out as the replacement, a possible stop string as it is."""
    assert push_all(assembler(max_tokens=2), [A, E2])[-1] == Piece(1, [E2], "\ufffd", "length")
    answer = assembler(max_tokens=2, stop=("abb",))
    assert push_all(answer, [A, B])[-1] == Piece(0, [A, B], "ab", "length")


def test_a_stop_at_the_last_token_is_a_stop() -> None:
    """The answer is whole, so `length` would mislead."""
    assert push_all(assembler(max_tokens=1, stop_ids=frozenset({A})), [A])[0].finish == "stop"
    assert push_all(assembler(max_tokens=1, stop=("a",)), [A])[0].finish == "stop"


def test_a_stop_string_that_the_last_replacement_completes_counts() -> None:
    """U+FFFD is text like any other."""
    answer = assembler(max_tokens=2, stop=("a\ufffd",))
    assert push_all(answer, [A, E2])[-1] == Piece(0, [A, E2], "", "stop")


def test_what_waits_at_a_stop_id_leaves_with_it() -> None:
    """Half a character will not be completed any more."""
    answer = assembler(stop_ids=frozenset({CONTROL}))
    assert push_all(answer, [E2, CONTROL])[-1] == Piece(0, [E2, CONTROL], "\ufffd", "stop")


@given(
    ids=ids_lists,
    stop=stop_strings_lists,
    stop_ids=stop_id_sets,
    max_tokens=st.integers(1, 25),
)
def test_any_answer_is_what_the_rules_say(
    ids: list[int], stop: list[str], stop_ids: frozenset[int], max_tokens: int
) -> None:
    """The rules, written once more and plainly, over the whole answer."""
    answer = assembler(max_tokens=max_tokens, stop_ids=stop_ids, stop=tuple(stop))
    pieces = push_all(answer, ids)
    taken, text, finish = _plainly(ids, stop, stop_ids, max_tokens)
    delivered = [token_id for piece in pieces for token_id in piece.ids]
    assert pieces[-1].finish == finish == answer.finish
    if finish is not None:
        assert delivered == taken
        assert "".join(piece.text for piece in pieces) == text
    assert [piece.index for piece in pieces] == _running_counts(pieces)


@given(ids=ids_lists, stop=stop_strings_lists)
def test_what_was_delivered_is_always_ids_and_exactly_their_text(
    ids: list[int], stop: list[str]
) -> None:
    """This is what makes a resumed answer lose and double nothing."""
    answer, delivered, text = assembler(stop=tuple(stop)), [], ""
    for token_id in ids:
        piece = answer.push(token_id)
        if piece.finish is not None:
            break
        delivered += piece.ids
        text += piece.text
        assert text == decode(delivered)


# --- handing over and resuming ---------------------------------------------------------------


@given(ids=ids_lists, stop=stop_strings_lists, stop_ids=stop_id_sets, at=st.integers(0, 25))
def test_another_assembler_goes_on_as_if_there_had_been_one(
    ids: list[int], stop: list[str], stop_ids: frozenset[int], at: int
) -> None:
    """One daemon samples the first token, another the rest; the client must not see the seam."""
    one = assembler(max_tokens=20, stop_ids=stop_ids, stop=tuple(stop))
    undisturbed = push_all(one, ids)
    first = assembler(max_tokens=20, stop_ids=stop_ids, stop=tuple(stop))
    pieces = push_all(first, ids[:at])
    second = assembler(max_tokens=20, stop_ids=stop_ids, stop=tuple(stop))
    replayed = second.replay(ids[:at], num_delivered=first.num_delivered)
    assert replayed == Piece(first.num_delivered, [], "", first.finish)
    if replayed.finish is None:
        pieces += push_all(second, ids[at:])
    assert pieces == undisturbed


def test_replay_gives_what_was_not_delivered_yet() -> None:
    """A daemon may die after it sampled and before it sent."""
    assert assembler().replay([A, THE, E2], num_delivered=1) == Piece(1, [THE], " the", None)


def test_replay_tells_that_the_ids_were_a_whole_answer() -> None:
    """A client that lost only the END resumes with all ids and gets just the END."""
    answer = assembler(max_tokens=2)
    assert answer.replay([A, B], num_delivered=2) == Piece(2, [], "", "length")
    assert answer.num_sampled == 2


def test_replay_leaves_out_what_stands_behind_the_end() -> None:
    """Ids behind the end are no part of the answer, whoever sent them."""
    answer = assembler(stop_ids=frozenset({B}))
    assert answer.replay([A, B, A, A], num_delivered=0) == Piece(0, [A, B], "a", "stop")


def test_ids_that_the_client_has_are_not_sent_with_text_that_it_lacks() -> None:
    """A client with half a character gets the whole one, and no id twice."""
    answer = assembler()
    assert answer.replay([A, E2], num_delivered=2) == Piece(2, [], "", None)
    assert answer.push(X82).is_empty
    assert answer.push(AC) == Piece(2, [X82, AC], "€", None)


def test_more_delivered_than_sampled_is_refused() -> None:
    """The counts come from another process."""
    with pytest.raises(ValueError, match="2 ids were delivered, but there are 1"):
        assembler().replay([A], num_delivered=2)


def _plainly(
    ids: list[int], stop: list[str], stop_ids: frozenset[int], max_tokens: int
) -> tuple[list[int], str, FinishReason | None]:
    """Return the answer's ids, its text and its end, by looking at every prefix anew."""
    for count in range(1, len(ids) + 1):
        taken = ids[:count]
        is_stop_id = taken[-1] in stop_ids
        is_last = is_stop_id or count == max_tokens
        data = b"".join(BYTES[i] for i in (taken[:-1] if is_stop_id else taken))
        text = data.decode(errors="replace")
        if not is_last:  # a character that may still be completed is not there yet
            text = text[: len(text) - _num_incomplete(data)]
        for end in range(1, len(text) + 1):
            complete = [string for string in stop if text[:end].endswith(string)]
            if complete:
                return taken, text[: end - max(map(len, complete))], "stop"
        if is_last:
            return taken, text, "stop" if is_stop_id else "length"
    return ids, "", None


def _num_incomplete(data: bytes) -> int:
    """Return 1 when the text ends in half a character, which decodes to one U+FFFD."""
    return int(data.endswith((b"\xe2", b"\xe2\x82")))


def _running_counts(pieces: list[Piece]) -> list[int]:
    counts, total = [], 0
    for piece in pieces:
        counts.append(total)
        total += len(piece.ids)
    return counts


# --- shortest answers ------------------------------------------------------------------------


def test_stop_strings_and_stop_ids_end_nothing_before_the_shortest_answer() -> None:
    """Text of the first ids is not even held back: no stop string can come of it."""
    answer = assembler(min_tokens=3, stop_ids=frozenset({CONTROL}), stop=("ab",))
    assert push_all(answer, [A, B, CONTROL]) == [
        Piece(0, [A], "a", None),
        Piece(1, [B], "b", None),
        Piece(2, [CONTROL], "", None),
    ]
    assert answer.push(CONTROL) == Piece(3, [CONTROL], "", "stop")


def test_a_stop_string_that_begins_in_the_shortest_answer_is_none() -> None:
    """Only text behind it is searched."""
    answer = assembler(min_tokens=1, stop=("ab",))
    assert [piece.finish for piece in push_all(answer, [A, B, AB])] == [None, None, "stop"]


def test_the_longest_answer_may_be_the_shortest() -> None:
    answer = assembler(min_tokens=2, max_tokens=2, stop=("b",))
    assert [piece.finish for piece in push_all(answer, [A, B])] == [None, "length"]


# --- against transformers --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and transformers' over one vocabulary of merged pieces."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    return hub_tokenizer(folder, vocab_size=384), theirs


@pytest.mark.parametrize("stop", ["blue", "e sk", "? Be", "scatters blue l", "y", "nowhere"])
def test_a_stop_string_ends_an_answer_with_the_token_at_which_transformers_ends_it(
    tokenizers: tuple[Tokenizer, Any], stop: str
) -> None:
    """Wherever the string begins and ends within tokens; the text is cut before it."""
    import torch
    from transformers import StopStringCriteria

    ours, theirs = tokenizers
    ids = ours.encode(TEXTS[0])[1:]
    criterion = StopStringCriteria(theirs, [stop])
    expected = next(
        (
            length
            for length in range(1, len(ids) + 1)
            if bool(criterion(torch.tensor([ids[:length]]), torch.empty(0)))
        ),
        None,
    )
    answer = AnswerAssembler(ours.token_bytes, max_tokens=1000, stop_strings=[stop])
    pieces = push_all(answer, ids)
    assert (answer.num_sampled if answer.finish else None) == expected
    if expected is not None:
        assert "".join(piece.text for piece in pieces) == TEXTS[0][: TEXTS[0].index(stop)]
