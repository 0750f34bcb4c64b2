"""Lines of prompts, and which of them are answered already."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from protocol.exchange import Options
from protocol.messages import ChatMessage, Sampling
from shared.cli.prompt_file import (
    AnswerFile,
    BrokenLineError,
    PromptLine,
    parse_line,
    read_lines,
)
from shared.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

DEFAULTS: Options = {"max_tokens": 9, "sampling": Sampling(temperature=0.5, seed=1)}


def line(body: object) -> PromptLine:
    return PromptLine(number=1, data=json.dumps(body).encode())


def test_lines_are_numbered_from_one_and_empty_ones_are_none(tmp_path: Path) -> None:
    """The number is the one that an editor shows."""
    path = tmp_path / "p"
    path.write_bytes(b'"a"\n\n  \r\n"b"\r\n"c"')
    lines = list(read_lines(path))
    assert [(one.number, one.data) for one in lines] == [(1, b'"a"'), (4, b'"b"'), (5, b'"c"')]
    assert lines[0].digest != lines[1].digest


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        list(read_lines(tmp_path / "gone"))


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ("text", "text"),
        ({"prompt": "text"}, "text"),
        ({"prompt": [1, 2]}, [1, 2]),
        (
            {"prompt": [{"role": "user", "content": "hi"}]},
            [ChatMessage(role="user", content="hi")],
        ),
        (
            {"prompt": "hi", "system": "S"},
            [ChatMessage(role="system", content="S"), ChatMessage(role="user", content="hi")],
        ),
    ],
)
def test_a_prompt_is_text_or_ids_or_chat(body: object, prompt: object) -> None:
    assert parse_line(line(body), DEFAULTS) == (prompt, DEFAULTS)


def test_a_line_goes_before_the_flags() -> None:
    """Field by field, also within `sampling`."""
    body = {"prompt": "x", "max_tokens": 3, "id": "a", "sampling": {"seed": 2, "min_p": 0.1}}
    _, options = parse_line(line(body), DEFAULTS)
    assert options == {
        "max_tokens": 3,
        "id": "a",
        "sampling": Sampling(temperature=0.5, seed=2, min_p=0.1),
    }


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (3, "neither a text nor an object with a `prompt`"),
        ({"text": "x"}, "neither a text nor an object with a `prompt`"),
        ({"prompt": []}, "`prompt` is an empty list"),
        ({"prompt": 5}, "Expected `str | array`"),
        ({"prompt": [{"role": "user"}]}, "chat messages that are none: .*`content`"),
        ({"prompt": "x", "heat": 1}, "unknown field `heat`"),
        ({"prompt": "x", "max_tokens": 0}, r"`\$.max_tokens`"),
        ({"prompt": "x", "min_tokens": 10}, "`min_tokens` is 10, above `max_tokens`, 9"),
        ({"prompt": "x", "sampling": 3}, "`sampling` is no object"),
        ({"prompt": "x", "sampling": {"top_p": 0}}, "`sampling`: Expected"),
        ({"prompt": "x", "sampling": {"cold": 1}}, "`sampling`: .*unknown field `cold`"),
        ({"prompt": [1], "system": "S"}, "`system` is a text and goes with"),
        ({"prompt": "a\ud800"}, r"generate\.prompt: character 2 is half of a surrogate pair"),
        ({"prompt": "a", "stop": ["\udc00"]}, r"generate\.stop\[0\]: character 1 is half"),
        ({"prompt": "a", "system": "\udc00"}, r"generate\.prompt\[0\]\.content: character 1"),
    ],
)
def test_a_broken_line_is_told_what_is_wrong_with_it(body: Any, fault: str) -> None:  # noqa: ANN401
    with pytest.raises(BrokenLineError, match=fault):
        parse_line(line(body), DEFAULTS)


def test_the_fault_in_json_is_told_by_column() -> None:
    """The parser's own "line 1" would contradict the line's number in the file."""
    with pytest.raises(BrokenLineError, match=r"no JSON: .* at column 2$"):
        parse_line(PromptLine(number=3, data=b"{broken"), DEFAULTS)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_json_is_a_broken_line(data: bytes) -> None:
    with pytest.raises(BrokenLineError, match="no JSON"):
        parse_line(PromptLine(number=1, data=data), DEFAULTS)


# --- what is answered already ----------------------------------------------------------------

LINES = [PromptLine(number=number, data=b'"%d"' % number) for number in range(1, 6)]


def entry(index: int, **more: object) -> str:
    return json.dumps({"line": LINES[index].number, "input": LINES[index].digest, **more}) + "\n"


def test_answers_are_kept_and_failures_and_torn_lines_dropped(tmp_path: Path) -> None:
    """A failed line is asked again, and its old failure must not stand beside its answer."""
    path = tmp_path / "out"
    good = entry(0, text="a") + entry(3, text="d")
    path.write_text(good + entry(1, error={"code": "busy"}) + "no json\n" + entry(2)[:-5])
    assert AnswerFile(path).done(iter(LINES)) == {1, 4}
    assert path.read_text() == good


def test_a_file_that_is_not_there_has_nothing(tmp_path: Path) -> None:
    assert AnswerFile(tmp_path / "out").done(iter(LINES)) == set()
    assert AnswerFile(None).done(iter(LINES)) == set()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_plain_file_is_only_written_to(tmp_path: Path) -> None:
    """A pipe has nothing to read yet, and a device must not be replaced by a file."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    assert AnswerFile(path).done(iter(LINES)) == set()
    assert path.is_fifo()


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    """Its user put the answers elsewhere on purpose."""
    target, link = tmp_path / "answers", tmp_path / "out"
    target.write_text(entry(0, text="a") + "torn")
    link.symlink_to(target)
    assert AnswerFile(link).done(iter(LINES)) == {1}
    assert link.is_symlink()
    assert target.read_text() == entry(0, text="a")


def test_answers_to_other_prompts_are_left_alone(tmp_path: Path) -> None:
    """Going on would mix two files' answers."""
    path = tmp_path / "out"
    other = json.dumps({"line": 2, "input": "0" * 16, "text": "x"}) + "\n"
    path.write_text(other)
    with pytest.raises(UsageError, match=r"answers other prompts \(line 2\); name another file"):
        AnswerFile(path).done(iter(LINES))
    assert path.read_text() == other
