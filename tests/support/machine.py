"""A machine with a systemd of its own: a container over this machine's root, which never changes.

systemd-nspawn boots a root of `roots.py` without a network and without any unit that this machine
has enabled; commands enter by `nsenter`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.pair import wait_until
from tests.support.roots import (
    SITE_PACKAGES,
    SOURCE,
    check_able,
    make_root,
    nspawn_command,
    run_inside,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BOOT_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 90.0
"""For one command on a machine that is busy with other tests."""


class Machine:
    """A booted container; `Machine.boot` makes one.

    Args:
        root: Its root directory, as this machine sees it.
        leader: The pid of its PID 1, as this machine sees it.
    """

    def __init__(self, root: Path, leader: int) -> None:
        self.root, self._leader = root, leader

    @classmethod
    @contextmanager
    def boot(cls, folder: Path) -> Iterator[Machine]:
        """Make the root, install kvpair in it as a user would, boot it, and take all away.

        Args:
            folder: An empty folder.

        Raises:
            AssertionError: This machine cannot do that; the text says what it lacks.
        """
        check_able()
        with ExitStack() as undo:
            root = make_root(folder, undo)
            _install(root)
            console = (folder / "console").open("wb")
            undo.callback(console.close)
            nspawn = subprocess.Popen(
                [
                    *nspawn_command(root),
                    *("--private-network", "--boot", "--"),
                    # Nothing of what this machine has enabled, and no timer, is to be started.
                    *("--unit=basic.target", "systemd.mask=timers.target"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
            undo.callback(_power_off, nspawn)
            machine = cls(root, _leader_of(nspawn, folder / "console"))
            wait_until(
                lambda: machine.run("systemctl", "is-system-running", check=False) == "running",
                timeout_s=BOOT_TIMEOUT_S,
                what="systemd has booted",
            )
            yield machine

    # --- commands ----------------------------------------------------------------------------

    def command(self, *argv: str, user: str | None = None) -> list[str]:
        """Return the command line that runs `argv` inside, as root or as `user`."""
        enter = ("nsenter", "-t", str(self._leader), *["-m", "-u", "-i", "-n", "-p", "-C"], "--")
        return [*enter, *(("runuser", "-u", user, "--") if user else ()), *argv]

    def ask(
        self, *argv: str, user: str | None = None, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, whatever that is."""
        return subprocess.run(
            self.command(*argv, user=user),
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",  # a random model's answers
            check=False,
            env=_clean_environment(),
            timeout=COMMAND_TIMEOUT_S,
        )

    def run(self, *argv: str, user: str | None = None, check: bool = True) -> str:
        """Run a command and return what it said on its standard output.

        Raises:
            AssertionError: It failed, and `check` says that it must not.
        """
        done = self.ask(*argv, user=user)
        if check and done.returncode != 0:
            said = f"{done.stdout}\n{done.stderr}".strip()
            raise AssertionError(f"{' '.join(argv)} ended with {done.returncode}: {said}")
        return done.stdout.strip()

    def start(self, *argv: str, user: str | None = None) -> subprocess.Popen[str]:
        """Start a command; its standard output and standard input are pipes."""
        return subprocess.Popen(
            self.command(*argv, user=user),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_clean_environment(),
        )

    def unmount_packages(self) -> None:
        """Take away the packages that the installation borrows from this checkout, if it does."""
        place = "/" + SITE_PACKAGES.format(*sys.version_info[:2])
        self.run("umount", "--lazy", place, check=False)

    # --- systemd -----------------------------------------------------------------------------

    def systemctl(self, *argv: str) -> str:
        """Run systemctl, which must succeed."""
        return self.run("systemctl", *argv)

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Return a unit's properties."""
        text = self.systemctl("show", unit, *(f"--property={name}" for name in properties))
        return dict(line.split("=", 1) for line in text.splitlines())

    def property(self, unit: str, name: str) -> str:
        """Return one property of a unit."""
        return self.show(unit, name)[name]

    def main_pid(self, unit: str) -> int:
        """Return a service's main process, as the machine sees it; 0 where it has none."""
        return int(self.property(unit, "MainPID"))

    def wait_property(self, unit: str, name: str, value: str) -> None:
        """Wait until a unit's property has a value."""
        wait_until(
            lambda: self.property(unit, name) == value,
            timeout_s=COMMAND_TIMEOUT_S,
            what=f"{name}={value} of {unit}, which is {self.property(unit, name)!r}",
        )

    def drop_in(self, unit: str, text: str) -> None:
        """Give a unit a drop-in for this run of the machine, and have it read."""
        folder = f"/run/systemd/system/{unit}.d"
        self.write(f"{folder}/test.conf", text)
        self.systemctl("daemon-reload")

    def revert(self, unit: str) -> None:
        """Take that drop-in away."""
        self.run("rm", "-rf", f"/run/systemd/system/{unit}.d")
        self.systemctl("daemon-reload")

    def write(self, path: str, text: str) -> None:
        """Write a file inside; `/run` is not to be seen from outside."""
        self.run("mkdir", "-p", str(Path(path).parent))
        done = self.ask("tee", path, stdin=text)
        assert done.returncode == 0, done.stderr

    def journal(self, unit: str) -> list[str]:
        """Return the lines that a service's processes wrote."""
        text = self.run("journalctl", "-o", "json", f"_SYSTEMD_UNIT={unit}", check=False)
        return [str(json.loads(line)["MESSAGE"]) for line in text.splitlines()]

    def events(self, unit: str, event: str) -> list[dict[str, Any]]:
        """Return a daemon's log lines of one event."""
        lines = [json.loads(line) for line in self.journal(unit) if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]


def _install(root: Path) -> None:
    """Type what README.md says; the boot then starts the socket, as it would on any machine."""
    run_inside(root, "make", "-C", SOURCE, "install-system")
    run_inside(root, "systemctl", "enable", "prefilld", "decoded")


def _leader_of(nspawn: subprocess.Popen[bytes], console: Path) -> int:
    """Return the pid of the container's PID 1, once systemd is there."""
    deadline_s = time.monotonic() + BOOT_TIMEOUT_S
    while time.monotonic() < deadline_s and nspawn.poll() is None:
        for children in Path(f"/proc/{nspawn.pid}/task").glob("*/children"):
            for pid in children.read_text().split():
                if Path(f"/proc/{pid}/comm").read_text().strip() == "systemd":
                    return int(pid)
        time.sleep(0.05)
    raise AssertionError(f"systemd does not boot here:\n{console.read_text(errors='replace')}")


def _power_off(nspawn: subprocess.Popen[bytes]) -> None:
    nspawn.terminate()  # nspawn passes it on as a request to power off
    try:
        nspawn.wait(timeout=30)
    except subprocess.TimeoutExpired:
        nspawn.kill()
        nspawn.wait()


def _clean_environment() -> Mapping[str, str]:
    """Return the environment of commands inside: nothing of this checkout's."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "LANG": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": "cat"}
