"""How long a daemon must have been idle before its books are counted."""

from __future__ import annotations

from shared.daemon.quiet import QUIET_S, QuietTime


def test_quiet_is_over_once_it_has_lasted() -> None:
    """Counted from the first look at which nothing was to do."""
    quiet = QuietTime()
    assert not quiet.is_over(is_idle=True, now_s=100.0)
    assert not quiet.is_over(is_idle=True, now_s=100.0 + QUIET_S - 0.1)
    assert quiet.is_over(is_idle=True, now_s=100.0 + QUIET_S)
    assert quiet.is_over(is_idle=True, now_s=200.0)


def test_any_work_begins_it_anew() -> None:
    """A burst of requests is not interrupted by counting."""
    quiet = QuietTime()
    quiet.is_over(is_idle=True, now_s=100.0)
    assert not quiet.is_over(is_idle=False, now_s=200.0)
    assert not quiet.is_over(is_idle=True, now_s=200.1)
    assert not quiet.is_over(is_idle=True, now_s=200.0 + QUIET_S)
    assert quiet.is_over(is_idle=True, now_s=200.1 + QUIET_S)
