"""The tokenizer, held against a plain pipeline of the library, and against text."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shared.model.errors import ModelFileError, PromptError, PromptTooLargeError
from shared.model.gguf_file import read_header
from shared.model.gguf_model import read_vocabulary
from shared.model.gguf_tokenizer import PRE_TOKENIZERS, vocabulary_tokenizer
from shared.model.tokenizer import Tokenizer
from shared.model.vocabulary import TokenType, Vocabulary
from tests.support.tiny_gguf import CONTROL_TOKENS, MERGES, byte_tokens, tokens

REPOSITORY = Path(__file__).parents[4]
SOURCE = Path("tiny.gguf")
TINY = Vocabulary(
    model="gpt2",
    pre="smollm",
    tokens=tuple(tokens()),
    token_types=tuple(3 if token in CONTROL_TOKENS else 1 for token in tokens()),
    merges=MERGES,
    add_bos=False,
    bos_id=1,
)
END, START = 0, 1


def ids_of(*texts: str) -> list[int]:
    return [TINY.tokens.index(text) for text in texts]


def make(**changes: object) -> Tokenizer:
    return vocabulary_tokenizer(replace(TINY, **changes), source=SOURCE)


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return make()


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> Tokenizer:
    return vocabulary_tokenizer(read_vocabulary(read_header(smollm2_file)), source=smollm2_file)


# --- the tiny vocabulary ---------------------------------------------------------------------


def test_merges_join_the_most_urgent_pairs_first(tiny: Tokenizer) -> None:
    """The order of the merges is the whole of what BPE was trained to."""
    assert tiny.encode("hello world") == ids_of("hello", "Ġw", "o", "r", "l", "d")


def test_control_texts_become_their_tokens(tiny: Tokenizer) -> None:
    """Chat templates write them; a merge never makes one."""
    assert tiny.encode("hello<|end|>") == [*ids_of("hello"), END]


def test_control_tokens_have_no_text_unless_they_are_kept(tiny: Tokenizer) -> None:
    """An answer must not show `<|end|>`, and a round trip must not lose it."""
    ids = tiny.encode("hello<|end|>")
    assert tiny.decode(ids) == "hello"
    assert tiny.decode(ids, keep_control=True) == "hello<|end|>"
    assert tiny.token_bytes(END) == b""


def test_bos_comes_first_where_the_model_wants_it() -> None:
    """The flag is the file's; leaving the token out makes such a model worse."""
    assert make(add_bos=True).encode("he") == [START, *ids_of("he")]
    assert make(add_bos=True).encode("") == [START]
    assert make(add_bos=True, bos_id=None).encode("he") == ids_of("he")


def test_bos_is_not_doubled_where_the_template_wrote_it() -> None:
    """Templates of such models begin with the token's text."""
    assert make(add_bos=True).encode("<|start|>he") == [START, *ids_of("he")]


def test_user_defined_tokens_are_taken_whole_and_have_text() -> None:
    """They stand for themselves, outside the byte-level alphabet."""
    text = "two words"
    tokenizer = make(
        tokens=(*TINY.tokens, text), token_types=(*TINY.token_types, TokenType.USER_DEFINED)
    )
    ids = tokenizer.encode(f"he{text}he")
    assert ids == [*ids_of("he"), len(TINY.tokens), *ids_of("he")]
    assert tokenizer.decode(ids) == f"he{text}he"


def test_bytes_that_are_no_character_decode_to_the_replacement(tiny: Tokenizer) -> None:
    """A model may sample any id after any other."""
    assert tiny.decode([TINY.tokens.index(byte_tokens()[-1])]) == "\ufffd"


def test_vocab_size_counts_every_id(tiny: Tokenizer) -> None:
    """Ids below it are valid, and no others."""
    assert tiny.vocab_size == len(TINY.tokens)
    with pytest.raises(IndexError, match="out of range"):
        tiny.token_bytes(tiny.vocab_size)


def test_a_text_that_cannot_fit_is_refused_without_being_tokenised(tiny: Tokenizer) -> None:
    """The longest token (`<|start|>`, 9 bytes) bounds how much text few tokens can be."""
    assert len(tiny.encode("<|start|>" * 10, max_tokens=10)) == 10
    with pytest.raises(
        PromptTooLargeError, match="a text of 91 bytes is at least 11 tokens; 10 is the most here"
    ):
        tiny.encode("<|start|>" * 10 + "h", max_tokens=10)


def test_a_lone_surrogate_is_refused_by_its_place(tiny: Tokenizer) -> None:
    """Python strings can hold one; no bytes stand for it."""
    with pytest.raises(PromptError, match="character 2 of the text is a lone surrogate"):
        tiny.encode("he\ud800")


def test_a_character_without_tokens_is_refused_by_its_place() -> None:
    """The library would drop it, and the model would answer another question."""
    lacking = byte_tokens()[byte_tokens().index("x")]
    kept = tuple(token for token in TINY.tokens if token != lacking)
    tokenizer = make(tokens=kept, token_types=(3, 3, *[1] * (len(kept) - 2)))
    assert tokenizer.encode("hello")
    with pytest.raises(PromptError, match=r"character 3 of the text, U\+0078, has no token"):
        tokenizer.encode("he x")


def test_an_unknown_splitting_rule_is_refused_with_the_list() -> None:
    """A wrong guess would change some texts a little and nobody would see it."""
    with pytest.raises(ModelFileError, match=r"the rule 'llama-bpe' .*known are: gpt-2, smollm"):
        make(pre="llama-bpe")


def test_the_rules_differ_in_how_they_split_digits() -> None:
    """What `smollm` is for, and what ignoring it gets wrong."""
    split = {
        pre: [piece for piece, _ in PRE_TOKENIZERS[pre]().pre_tokenize_str("in 2024")]
        for pre in ("gpt-2", "smollm")
    }
    assert split == {"gpt-2": ["in", "Ġ2024"], "smollm": ["in", "Ġ", "2", "0", "2", "4"]}


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (
            {"tokens": (*TINY.tokens, "he"), "token_types": (*TINY.token_types, 1)},
            "has two tokens of the same text",
        ),
        ({"merges": ("h q",)}, "has the merge 'h q' of what are not its tokens"),
        ({"merges": ("he",)}, "has the merge 'he' of what are not its tokens"),
        (
            {"tokens": (*TINY.tokens, "two words"), "token_types": (*TINY.token_types, 1)},
            "has the token 'two words': ' ' stands for no byte",
        ),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(
    changes: dict[str, object], fault: str
) -> None:
    """A damaged file would otherwise tokenise most texts rightly."""
    with pytest.raises(ModelFileError, match=fault):
        make(**changes)


@given(text=st.text(max_size=60))
@example("\x04\U00040000")
@example("<|end|><|start|>")
def test_any_text_comes_back_from_its_ids(tiny: Tokenizer, text: str) -> None:
    """The tiny vocabulary has every byte, so nothing is refused here."""
    assert tiny.decode(tiny.encode(text), keep_control=True) == text


@given(ids=st.lists(st.integers(0, len(TINY.tokens) - 1), max_size=40))
def test_any_ids_decode_as_the_library_decodes_them(
    tiny: Tokenizer, tiny_library: tokenizers.Tokenizer, ids: list[int]
) -> None:
    """We decode by bytes, so that the incremental decoder agrees with us."""
    assert tiny.decode(ids) == tiny_library.decode(ids, skip_special_tokens=True)


# --- the embedded model ----------------------------------------------------------------------


@pytest.mark.model
def test_every_trace_text_tokenises_as_in_a_plain_pipeline(
    smollm2: Tokenizer, smollm2_library: tokenizers.Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference is the library with nothing of ours but the reading of the file's lists."""
    folder, texts = _trace_texts()
    for text in texts:
        ids = smollm2.encode(text)
        assert ids == smollm2_library.encode(text, add_special_tokens=False).ids
        assert smollm2.decode(ids, keep_control=True) == text
    with capsys.disabled():
        print(f"\n[tokenizer: {len(texts)} texts of {folder} agree]")


@pytest.mark.model
@settings(max_examples=300)
@given(text=st.text(max_size=80))
def test_any_text_comes_back_or_is_refused_by_its_character(
    smollm2: Tokenizer, smollm2_library: tokenizers.Tokenizer, text: str
) -> None:
    """The model lacks tokens for some bytes; what it accepts it gives back to the letter."""
    try:
        ids = smollm2.encode(text)
    except PromptError:
        # Only what the library would have lost.
        library_ids = smollm2_library.encode(text, add_special_tokens=False).ids
        assert smollm2_library.decode(library_ids, skip_special_tokens=False) != text
    else:
        assert smollm2.decode(ids, keep_control=True) == text


@pytest.mark.model
def test_the_largest_text_that_might_fit_is_tokenised_in_a_moment(smollm2: Tokenizer) -> None:
    """A request may carry 4 MiB; what cannot be 8,192 tokens never reaches the library.

    No time is measured: a quadratic algorithm would run into the suite's own limit.
    """
    with pytest.raises(PromptTooLargeError, match="a text of 4194304 bytes is at least"):
        smollm2.encode("a" * (4 << 20), max_tokens=8192)
    assert len(smollm2.encode("a" * 600_000, max_tokens=8192)) > 8192


@pytest.mark.model
@pytest.mark.slow
def test_where_transformers_conversion_differs_is_known(
    smollm2: Tokenizer, smollm2_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ignores `pre`, so white space in front of a digit is split another way, and only there."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(
        str(smollm2_file.parent), gguf_file=smollm2_file.name
    ).backend_tokenizer
    folder, texts = _trace_texts()
    different = [
        text
        for text in texts
        if theirs.encode(text, add_special_tokens=False).ids != smollm2.encode(text)
    ]
    with capsys.disabled():
        print(f"\n[tokenizer: transformers differs on {len(different)} texts of {folder}:]")
        for text in different:
            print(f"  {text[:90]!r}")
    assert theirs.encode("1\n\n2", add_special_tokens=False).ids != smollm2.encode("1\n\n2")
    assert all(re.search(r"\s\s\d", text) for text in different)


@pytest.fixture(scope="module")
def tiny_library() -> tokenizers.Tokenizer:
    """The library's own pipeline over the tiny vocabulary."""
    return _plain_pipeline(TINY.tokens, TINY.merges, list(CONTROL_TOKENS))


@pytest.fixture(scope="session")
def smollm2_library(smollm2_file: Path) -> tokenizers.Tokenizer:
    """The library's own pipeline over what stands in the file."""
    metadata = read_header(smollm2_file).metadata
    texts, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == TokenType.CONTROL]
    return _plain_pipeline(texts, metadata["tokenizer.ggml.merges"], control)


def _plain_pipeline(
    texts: list[str] | tuple[str, ...], merges: list[str] | tuple[str, ...], control: list[str]
) -> tokenizers.Tokenizer:
    vocabulary = {text: index for index, text in enumerate(texts)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    pipeline = tokenizers.Tokenizer(models.BPE(vocabulary, pairs))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens([AddedToken(text, normalized=False) for text in control])
    return pipeline


def _trace_texts() -> tuple[Path, list[str]]:
    """Return every text under the traces: files and their lines, or the strings in their JSON.

    The traces lie beside the repository, not in it.  Without them the repository's own texts
    have to do, and the test's output says which it was.
    """
    default = REPOSITORY.parent / "shared" / "traces"
    folder = Path(os.environ.get("KVPAIR_TRACES", default))
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    if not paths:
        folder = REPOSITORY
        paths = [
            path
            for path in sorted(REPOSITORY.rglob("*"))
            if path.suffix in {".py", ".md", ".toml", ".txt"}
            and not any(part.startswith(".") for part in path.relative_to(REPOSITORY).parts)
        ]
    texts: dict[str, None] = {}
    for path in paths:
        whole = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            for line in whole.splitlines():
                texts |= dict.fromkeys(_strings(json.loads(line)))
        else:
            texts |= dict.fromkeys([whole, *whole.splitlines()])
    return folder, list(texts)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
