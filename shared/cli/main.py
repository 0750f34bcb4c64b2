"""Where `kvpair` starts: its version at once, everything else through the program proper.

Scripts and completions ask for the version often, and importing a command-line parser takes
several times as long as Python's own start.  So nothing is imported here that is not used.
"""

from __future__ import annotations

import os
import sys

from shared.version import __version__

STDERR_FD = 2
"""The last of the standard streams."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line, `sys.argv` unless given; ends the process with its exit code."""
    _open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        try:
            sys.stdout.write(f"kvpair {__version__}\n")
            sys.stdout.flush()
            sys.exit(0)
        except OSError:  # the program proper fails as well, and says why
            pass
    from shared.cli.program import run  # noqa: PLC0415  see above

    sys.exit(run(arguments))


def _open_standard_streams() -> None:
    """Open those that whoever started us had closed, to nowhere.

    Otherwise the next file or socket would get a number at which everybody, child processes
    included, writes messages.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= STDERR_FD:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8")
