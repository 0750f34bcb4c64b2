"""What a user can be told in one line, and the exit code that goes with it.

    KvpairError                          1    root; has `hint` and `exit_code`
    ├── UsageError                       2    the command line contradicts itself
    ├── DaemonUnavailableError           69   nobody answers at the socket
    ├── DaemonBusyError                  75   somebody answers: not now
    ├── ConfigError                      78   a value, and where it came from
    ├── MemoryShortageError              75   others hold the memory that a daemon needs now
    ├── PredecessorEndingError           75   the daemon before this one is not torn down yet
    └── EnvironmentUnsupportedError      78   this machine lacks what the configuration wants

Every text is one line that names the fault; `hint` is one more that says what to do about it.
Programs print `str(error)` and leave with `error.exit_code`: no traceback, since the fault is
not in our code.  What is our own bug is raised as anything else.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class ExitCode(enum.IntEnum):
    """How every program of the project ends; 69, 75 and 78 are those of sysexits.h."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_DAEMON = 69
    BUSY = 75
    CONFIG = 78
    INTERRUPTED = 130


class KvpairError(Exception):
    """Root of what is the user's to mend, not ours.

    Args:
        message: One line that names the fault.
        hint: One line that says what to do, where that is not plain from the message.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}; {self.hint}"


class UsageError(KvpairError):
    """The command line contradicts itself."""

    exit_code = ExitCode.USAGE


class DaemonUnavailableError(KvpairError):
    """No daemon answers at the socket."""

    exit_code = ExitCode.NO_DAEMON


class DaemonBusyError(KvpairError):
    """A daemon answers, but takes no request now: it is full or draining."""

    exit_code = ExitCode.BUSY


class MemoryShortageError(KvpairError):
    """Others hold the memory that a daemon needs: the same start may work in a while.

    Its code is one after which a service manager tries again.
    """

    exit_code = ExitCode.BUSY


class PredecessorEndingError(KvpairError):
    """The daemon before this one is ending and holds what this one needs: try again in a while."""

    exit_code = ExitCode.BUSY


class ConfigError(KvpairError):
    """A configured value cannot be used; the message names it and where it came from."""

    exit_code = ExitCode.CONFIG


class EnvironmentUnsupportedError(KvpairError):
    """This machine, kernel or user lacks something that the configuration asks for."""

    exit_code = ExitCode.CONFIG
