"""What the figures of `gpu_shown` must keep to, and which of them do not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.smollm2_answers import MAX_BFLOAT16_ERROR, MAX_BFLOAT16_FLIPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Bound:
    """What a figure must keep to."""

    low: float
    high: float


ENDLESS = math.inf
NOTHING = Bound(-ENDLESS, 0)

FLAT_MIB = Bound(-ENDLESS, 22.0)
"""Torch's allocator may take one more segment of each of its sizes, 2 and 20 MiB, by chance."""

FLAT_RSS_MIB = Bound(-ENDLESS, 32.0)
"""What allocators keep; a hundred mappings of the pool would be many times that."""

BOUNDS: dict[str, dict[str, Bound]] = {
    "handovers": {
        "handovers_differing": NOTHING,
        "late_differing": NOTHING,
        "unasked_differing_share": Bound(0.5, 1.0),
    },
    "large": {},
    "smollm2": {
        "smollm2_bf16_error": Bound(0.0, MAX_BFLOAT16_ERROR),
        "smollm2_bf16_flips": Bound(0.0, MAX_BFLOAT16_FLIPS),
    },
    "deaths": {
        "prefilld_killed_blocks_pending": Bound(1, ENDLESS),
        "prefilld_killed_itl_max_ms": Bound(0, 1000.0),  # a reader takes less for a pause
        "prefilld_killed_unmapped_s": Bound(0, 1.0),
        "decoded_killed_leases_revoked_ms": Bound(-ENDLESS, 100.0),
        "decoded_killed_leases_back_ms": Bound(-ENDLESS, 100.0),
        "decoded_killed_overlap_s": Bound(0.0, ENDLESS),  # it loads while the dead one is torn down
    },
    "steadiness": {
        "cycles_gpu_growth_mib": FLAT_MIB,
        "restarts_gpu_growth_mib": FLAT_MIB,
        "cycles_prefilld_more_descriptors": NOTHING,
        "cycles_decoded_more_descriptors": NOTHING,
        "cycles_prefilld_more_threads": NOTHING,
        "cycles_decoded_more_threads": NOTHING,
        "cycles_prefilld_rss_growth_mib": FLAT_RSS_MIB,
        "cycles_decoded_rss_growth_mib": FLAT_RSS_MIB,
    },
}
"""By phase, of those figures that have one; what has no figure failed or was out of reach."""


def missed(figures: Mapping[str, float], phases: Sequence[str]) -> list[str]:
    """Return in words which figures of some phases are out of bounds, or are not there."""
    return [
        f"{name} was not measured"
        if name not in figures
        else f"{name} is {figures[name]:g}, and not {bound.low:g} to {bound.high:g}"
        for phase in phases
        for name, bound in BOUNDS[phase].items()
        if not bound.low <= figures.get(name, math.nan) <= bound.high
    ]
