"""Where `kvpair` starts: its version at once, everything else through the program proper.

Scripts and completions ask for the version often, and importing a command-line parser takes
several times as long as Python's own start.  So nothing is imported here that is not used.
"""

from __future__ import annotations

import sys

from shared.version import __version__


def main(argv: list[str] | None = None) -> None:
    """Run the command line, `sys.argv` unless given; ends the process with its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments == ["--version"]:
        sys.stdout.write(f"kvpair {__version__}\n")
        sys.exit(0)
    from shared.cli.program import run  # noqa: PLC0415  see above

    sys.exit(run(arguments))
