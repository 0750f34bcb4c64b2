"""What a step brought, as its engine hands it over.  Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
"""A token's id, or None as well where not every sequence samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected(Generic[T]):
    """One step's, for all of its sequences."""

    token_ids: tuple[T, ...]
    """What each of them sampled, in order."""
    device_ns: int | None = None
    """How long the step took the GPU, by its clock; None where the CPU computed it."""
    written_ns: int | None = None
    """The part of that until its keys and values were in the pool, where anybody waits for that."""
