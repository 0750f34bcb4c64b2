"""Child processes that never outlive their parent, and signals that are waited for.

The parent blocks the signals it cares about and takes them one by one with `wait_for_signal`, so
nothing ever happens between two lines of its code.  Children get their mask back, and the kernel
sends them SIGTERM should the parent die without a word.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD})

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Signal:
    """A signal that arrived."""

    number: signal.Signals
    is_from_terminal: bool
    """Sent by the kernel: every process of the terminal's foreground group has it as well."""


class SignalWaiter:
    """Takes signals one at a time while they are blocked.  `blocked_signals` makes it."""

    def __init__(self, mask_before: set[int]) -> None:
        self._mask_before = mask_before

    def wait(self, timeout_s: float | None) -> Signal | None:
        """Return the next signal, or None when none came in time."""
        if timeout_s is None:
            info: signal.struct_siginfo | None = signal.sigwaitinfo(SIGNALS)
        else:
            info = signal.sigtimedwait(SIGNALS, max(0.0, timeout_s))
        if info is None:
            return None
        return Signal(signal.Signals(info.si_signo), info.si_code == _SI_KERNEL)

    def spawn(
        self, argv: Sequence[str], *, environ: Mapping[str, str], is_daemon: bool
    ) -> subprocess.Popen[bytes]:
        """Start a child that dies with this process.

        Args:
            argv: Program and arguments.
            environ: The child's whole environment.
            is_daemon: The child is a daemon of ours: it gets no stdin, its stdout is our stderr,
                and a session of its own, so that the terminal's Ctrl-C is ours to handle.  Any
                other child shares our streams and the terminal.

        Raises:
            OSError: The program cannot be run.
        """
        parent_pid = os.getpid()

        def prepare() -> None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
            if os.getppid() != parent_pid:  # it died before the kernel knew what to do then
                os._exit(128 + signal.SIGTERM)

        return subprocess.Popen(  # noqa: S603  the user's own command, or our daemons
            argv,
            env=environ,
            stdin=subprocess.DEVNULL if is_daemon else None,
            stdout=sys.stderr.fileno() if is_daemon else None,
            start_new_session=is_daemon,
            preexec_fn=prepare,  # noqa: PLW1509  this process has one thread
        )


@contextmanager
def blocked_signals() -> Iterator[SignalWaiter]:
    """Block the signals of `SIGNALS` for as long as the context lasts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    chld_before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would never come
    try:
        yield SignalWaiter({int(number) for number in before})
    finally:
        signal.signal(signal.SIGCHLD, chld_before)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
