"""Roots for containers: this machine's root below, a tmpfs above, so that nothing here changes.

Everything is taken away by the `ExitStack` that is handed in.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from contextlib import ExitStack

REPOSITORY = Path(__file__).parents[2]
SOURCE = "/usr/src/kvpair"
"""The checkout, inside."""

SITE_PACKAGES = "opt/kvpair/lib/python{}.{}/site-packages"


def check_able() -> None:
    """Fail where no container can be booted: a test that passes by doing nothing hides that."""
    if os.geteuid() != 0:
        raise AssertionError("booting a container needs root: run `sudo make test-systemd`")
    for tool, package in (("systemd-nspawn", "systemd-container"), ("nsenter", "util-linux")):
        if shutil.which(tool):
            continue
        if shutil.which("apt-get"):
            click.echo(f"installing {package}", err=True)
            subprocess.run(["apt-get", "install", "-y", "-q", package], check=False)
        if not shutil.which(tool):
            raise AssertionError(f"booting a container needs {tool}: install {package}")


def make_root(folder: Path, undo: ExitStack) -> Path:
    """Return an overlay of this machine's root, with the checkout's packages in the venv's place.

    pip then finds what it would download; what it installs goes to the tmpfs.
    """
    mount(folder, "-t", "tmpfs", "-o", "size=4g,mode=0755", "kvpair-test", undo=undo)
    root = overlay(Path("/"), folder, "root", folder / "root", undo)
    (root / "etc/machine-id").unlink(missing_ok=True)
    (root / "etc/machine-id").touch()  # so that the journal is nobody else's
    source = root / SOURCE.lstrip("/")
    source.mkdir(parents=True, exist_ok=True)
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    ).stdout
    for name in tracked.decode().split("\0"):
        if name and (REPOSITORY / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, source / name)
    if sys.version_info[:2] == _system_python_version():
        place = root / SITE_PACKAGES.format(*sys.version_info[:2])
        place.mkdir(parents=True, exist_ok=True)
        import torch

        overlay(Path(torch.__file__).parents[1], folder, "packages", place, undo)
    return root


def _system_python_version() -> tuple[int, ...]:
    done = subprocess.run(
        ["/usr/bin/python3", "-c", "import sys; print(*sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    )
    return tuple(int(part) for part in done.stdout.split())


def run_inside(root: Path, *command: str) -> str:
    """Run a command in a root that is not booted, with this machine's network.

    Raises:
        AssertionError: It failed.
    """
    done = subprocess.run(
        [*nspawn_command(root), "--as-pid2", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def overlay(lower: Path, folder: Path, name: str, target: Path, undo: ExitStack) -> Path:
    """Put a folder at `target` whose changes go to `folder`, and return it."""
    upper, work = folder / f"{name}-upper", folder / f"{name}-work"
    for path in (upper, work, target):
        path.mkdir(exist_ok=True)
    upper.chmod(lower.stat().st_mode & 0o7777)
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount(target, "-t", "overlay", "-o", options, "overlay", undo=undo)
    return target


def mount(target: Path, *arguments: str, undo: ExitStack) -> None:
    """Mount something until `undo`.

    Raises:
        AssertionError: This machine does not allow it.
    """
    done = subprocess.run(
        ["mount", *arguments, str(target)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise AssertionError(
            f"booting a container needs the right to mount file systems: {done.stderr.strip()}"
        )
    undo.callback(subprocess.run, ["umount", "--lazy", str(target)], check=False)


def nspawn_command(root: Path) -> list[str]:
    """Return the beginning of a command line that enters a root."""
    return [
        *("systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--link-journal=no"),
        *(f"--directory={root}", "--hostname=kvpair-test"),
    ]
