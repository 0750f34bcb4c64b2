"""Tokenizers of Hugging Face directories: ids and texts are those of transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.model.errors import ModelFileError
from shared.model.hub_tokenizer import hub_tokenizer
from tests.support.tiny_hub import END, PAD, SPECIAL, START, TEXTS, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from shared.model.tokenizer import Tokenizer

KINDS = ("byte-level", "sentence-piece")
VOCAB_SIZE = 384


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, Any]:
    """Ours and transformers' tokenizer over one directory."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, kind=request.param)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    return hub_tokenizer(folder, vocab_size=VOCAB_SIZE), theirs


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(TEXTS))
def test_ids_are_those_of_transformers(both: tuple[Tokenizer, Any], text: str) -> None:
    """With the `bos` token before, as its post-processor puts it."""
    ours, theirs = both
    assert ours.encode(text) == theirs(text).input_ids


@pytest.mark.parametrize("text", [*TEXTS, "Ω≈ç√ was in no training"])
def test_pieces_of_an_answer_join_to_its_text(both: tuple[Tokenizer, Any], text: str) -> None:
    """Token by token, without the control tokens; nothing is normalised away."""
    ours, theirs = both
    ids = ours.encode(text)
    pieces = b"".join(map(ours.token_bytes, ids)).decode()
    assert pieces in (text, f" {text}")  # SentencePiece puts a space before the first word
    assert theirs.decode(ids, skip_special_tokens=True) == text


def test_control_tokens_in_a_text_are_control_tokens(both: tuple[Tokenizer, Any]) -> None:
    """Chat templates write them; the first one is not doubled."""
    ours, _ = both
    ids = ours.encode(f"{SPECIAL[START]}a{SPECIAL[END]}")
    assert ids[0] == START
    assert ids[1] != START
    assert ids[-1] == END
    assert ours.token_bytes(START) == b""
    assert ours.decode([START], keep_control=True) == SPECIAL[START]


def test_tokens_that_only_the_model_has_have_no_text(both: tuple[Tokenizer, Any]) -> None:
    """Embeddings are often padded to a round number."""
    ours, _ = both
    assert ours.vocab_size == VOCAB_SIZE
    assert ours.decode([VOCAB_SIZE - 1], keep_control=True) == ""


@pytest.mark.parametrize(
    ("options", "before", "behind"),
    [
        ({"add_bos_token": False}, [], []),
        ({"add_bos_token": True}, [START], []),
        ({"add_bos_token": True, "add_eos_token": True}, [START], [END]),
    ],
)
def test_the_configuration_says_what_stands_around_a_text(
    tmp_path: Path, options: dict[str, bool], before: list[int], behind: list[int]
) -> None:
    """It goes before `tokenizer.json`, as in transformers."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    bare = hub_tokenizer(tmp_path, vocab_size=VOCAB_SIZE).encode(f"{SPECIAL[PAD]}x")
    assert bare[: len(before)] == before
    assert bare[len(before)] == PAD
    assert bare[len(bare) - len(behind) :] == behind
    assert len(bare) == len(before) + 2 + len(behind)


def test_a_model_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    """A prompt could name an embedding that is not there."""
    write_tokenizer(tmp_path)
    with pytest.raises(ModelFileError, match=r"has the token id 3\d+; the model has 300 tok"):
        hub_tokenizer(tmp_path, vocab_size=300)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "by WordPiece; known",
        ),
        ({"decoder": None}, "decodes by nothing; known are: ByteLevel, ByteFallback, Metaspace"),
        ({"model": 3}, "is no tokenizer that can be read"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], fault: str
) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelFileError, match=fault):
        hub_tokenizer(tmp_path, vocab_size=VOCAB_SIZE)


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: no such file"):
        hub_tokenizer(tmp_path, vocab_size=VOCAB_SIZE)
