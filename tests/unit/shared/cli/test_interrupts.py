"""A Ctrl-C that came too early to interrupt a wait interrupts it all the same."""

from __future__ import annotations

import os
import select
import signal
import threading

from shared.cli.interrupts import late_interrupts_seen


def test_a_wait_is_interrupted_again_and_again_until_the_line_is_over() -> None:
    """As readline waits: below Python, which looks at signals only when a wait is cut short."""
    handled: list[int] = []
    former = signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    try:
        with late_interrupts_seen():
            os.kill(os.getpid(), signal.SIGINT)
            poll = select.epoll()
            # Each nudge is a signal whose handler runs; Python then goes on waiting by itself.
            nudges: list[int] = []
            inner = signal.signal(signal.SIGURG, lambda number, _: nudges.append(number))
            while len(nudges) < 2:
                poll.poll(0.2)
            signal.signal(signal.SIGURG, inner)
            poll.close()
    finally:
        signal.signal(signal.SIGINT, former)
    assert handled == [signal.SIGINT]


def test_everything_is_as_before_afterwards() -> None:
    before = signal.getsignal(signal.SIGURG), threading.active_count()
    with late_interrupts_seen():
        assert threading.active_count() == before[1] + 1
    assert (signal.getsignal(signal.SIGURG), threading.active_count()) == before
    assert signal.set_wakeup_fd(-1) == -1
