"""Whether Triton will find what it builds its kernels' launchers with: a C compiler, and headers.

Triton finds out when the first kernel is built, minutes into a start, and tells it in a traceback.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPILE_TIMEOUT_S = 30.0
"""For one header, from a cold disk."""

INSTALL_HINT = "install gcc, the C library's headers and this Python's: gcc, libc6-dev, python3-dev"


def compiler_fault(environ: Mapping[str, str]) -> str | None:
    """Return why a file that includes Python's headers does not compile; None where it does.

    Args:
        environ: Where `CC` names the compiler; without it gcc is taken, or clang.  Triton looks
            for them in the same order.
    """
    path = environ.get("PATH")
    wanted = [environ["CC"]] if "CC" in environ else ["gcc", "clang"]
    found = filter(None, (shutil.which(name, path=path) for name in wanted))
    program = next(found, None)
    if program is None:
        return f"there is no C compiler ({' or '.join(wanted)})"
    command = [program, "-fsyntax-only", f"-I{_python_headers()}", "-x", "c", "-"]
    try:
        done = subprocess.run(  # noqa: S603  whoever sets CC may run what it names
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} cannot be run: {error}"
    if done.returncode == 0:
        return None
    said = [line for line in done.stderr.splitlines() if "error" in line] or [
        f"it ended with {done.returncode}"
    ]
    return f"{program} does not compile with Python's headers: {said[0].strip()}"


def _python_headers() -> str:
    """Return the folder that `Python.h` should be in."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's, which has no headers; Triton looks past it as well
        scheme = "posix_prefix"
    return sysconfig.get_path("include", scheme)
