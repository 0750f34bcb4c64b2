"""What an op raises when its arguments do not fit together."""

from __future__ import annotations


class ShapeError(ValueError):
    """A tensor's shape or type is not what the op's contract says.

    That is a bug in the caller, never something a client can cause.
    """
