"""What the command line says when an answer breaks off and is resumed: one line on stderr.

The answer itself goes on where it stopped, so stdout shows each character once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from protocol.resuming import ResumePolicy

if TYPE_CHECKING:
    from protocol.resuming import Loss


def telling_policy() -> ResumePolicy:
    """Return the clients' own policy, which also tells the user of each loss."""
    return ResumePolicy(on_loss=_tell)


def _tell(loss: Loss) -> None:
    if sys.stdout.isatty() and sys.stderr.isatty():
        click.echo(err=True)  # the line that the answer has begun is on the same screen
    what = "the answer made room for others" if loss.is_preempted else "a daemon went away"
    click.echo(
        f"kvpair: {what} after {loss.num_tokens} tokens; resuming "
        f"(attempt {loss.attempt} of {loss.max_attempts})",
        err=True,
    )
