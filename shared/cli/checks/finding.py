"""What a check found: whether it is well, in one line, and what to do where it is not."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from shared.errors import KvpairError


class Verdict(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """It will be regretted, or may stop something later."""
    FAIL = "fail"
    """With this the pair does not serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the doctor's."""

    check: str
    """What was looked at."""
    verdict: Verdict
    text: str
    cure: str | None = None
    """What to do; present wherever the verdict is not OK."""


def ok(check: str, text: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check=check, verdict=Verdict.OK, text=text)


def warn(check: str, text: str, *, cure: str) -> Finding:
    """Return a finding that somebody may regret."""
    return Finding(check=check, verdict=Verdict.WARN, text=text, cure=cure)


def fail(check: str, text: str, *, cure: str) -> Finding:
    """Return a finding with which the pair does not serve."""
    return Finding(check=check, verdict=Verdict.FAIL, text=text, cure=cure)


def from_error(check: str, error: KvpairError) -> Finding:
    """Return an error that the user can mend as a failure, in its own words."""
    return fail(check, error.message, cure=error.hint or "see README, Troubleshoot")
