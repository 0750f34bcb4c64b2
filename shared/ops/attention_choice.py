"""Which kernels compute attention of prompts: the fastest of those that agree with ours.

A library's kernels may be faster than those that come with torch, or slower, or of a version that
does something else; which, depends on the GPU and on the shape of the model.  So what is installed
is tried at the start on the shape that is to be served, and taken only for a reason that can be
told.  Nothing needs one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

AttentionName = Literal["auto", "torch", "flash-attn-4"]
"""What may be asked for; `auto` leaves it to measurement."""

GatheredAttention = Callable[["Tensor", "Tensor", float], "Tensor"]
"""Attends with [query_len, num_heads, head_dim] over a context in one piece, [2, context_len,
num_kv_heads, head_dim], keys first; the queries are its last tokens, and none looks ahead.  The
third argument is what scores are multiplied with.  Returns a tensor like the queries."""

MAX_DISAGREEMENT = 0.02
"""Of ‖theirs - ours‖ / ‖ours‖.  Either rounds its weights and its sum to bfloat16, which makes up
to 0.006 against float64 (`tests/gpu/ops`); a mask that ends elsewhere makes a multiple of it."""


class AttentionUnavailableError(Exception):
    """A library cannot be used; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    """What was chosen, and why."""

    name: str
    """`torch` for the kernels that come with it, else the library's."""
    because: str
    """The reason, in words."""
    measured_us: Mapping[str, float] = field(default_factory=dict)
    """Microseconds a layer of what was tried, by name."""


Load = Callable[[], GatheredAttention]
"""Imports a library.  Raises AttentionUnavailableError."""
Trial = Callable[["GatheredAttention | None"], tuple[float, "Tensor"]]
"""Runs attention of a long chunk, with a library's kernels or with ours, and returns microseconds
and what came out: of the same numbers every time."""


def choose_attention(
    wanted: AttentionName, libraries: Mapping[str, Load], trial: Trial
) -> tuple[GatheredAttention | None, AttentionChoice]:
    """Choose who computes attention.

    Args:
        wanted: What the configuration says.
        libraries: Each that is known, by name.
        trial: Runs one.

    Returns:
        The library's kernels, None for ours; and what to tell of it.

    Raises:
        AttentionUnavailableError: What was asked for by name cannot be used.
    """
    if wanted == "torch":
        return None, AttentionChoice(name="torch", because="asked for")
    ours = cache(partial(trial, None))  # once, and not where no library can be loaded
    if wanted != "auto":
        us, library = _tried(wanted, libraries[wanted], trial, ours)
        measured_us = {"torch": ours()[0], wanted: us}
        return library, AttentionChoice(name=wanted, because="asked for", measured_us=measured_us)
    tried: dict[str, tuple[float, GatheredAttention]] = {}
    reasons: list[str] = []
    for name, load in libraries.items():
        try:
            tried[name] = _tried(name, load, trial, ours)
        except AttentionUnavailableError as error:
            reasons.append(str(error))
    if not tried:
        return None, AttentionChoice(name="torch", because="; ".join(reasons))
    measured_us = {"torch": ours()[0]} | {name: us for name, (us, _) in tried.items()}
    fastest = min(measured_us, key=measured_us.__getitem__)  # ours, where another is no faster
    if fastest != "torch":
        choice = AttentionChoice(name=fastest, because="the fastest", measured_us=measured_us)
        return tried[fastest][1], choice
    because = "; ".join([*reasons, *(f"{name} is slower" for name in tried)])
    return None, AttentionChoice(name="torch", because=because, measured_us=measured_us)


def told(error: Exception) -> str:
    """Return an error of a library as one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tried(
    name: str, load: Load, trial: Trial, ours: Callable[[], tuple[float, Tensor]]
) -> tuple[float, GatheredAttention]:
    """Load a library and hold it against ours; return its microseconds and its kernels."""
    library = load()
    _, expected = ours()
    try:
        with warnings.catch_warnings():  # of its compiler
            warnings.simplefilter("ignore")
            us, found = trial(library)
    except Exception as error:  # it compiles now, with tools of its own: anything may go wrong
        raise AttentionUnavailableError(f"{name} fails: {told(error)}") from error
    if found.shape != expected.shape:
        raise AttentionUnavailableError(f"{name} returns {[*found.shape]}, not {[*expected.shape]}")
    off = float((found.float() - expected.float()).norm() / expected.float().norm())
    if not off <= MAX_DISAGREEMENT:  # NaN as well
        raise AttentionUnavailableError(f"{name} computes something else: it is off by {off:.2g}")
    return us, library
