"""Where the time of single hand-overs went: by the host's clock, by the GPUs', and line by line."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.benchmarks.stream_clients import Heard
    from tests.support.pair import Pair


def medians(told: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each value, over those that have it."""
    names = dict.fromkeys(name for each in told for name in each)
    return {name: statistics.median(each[name] for each in told if name in each) for name in names}


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Return values as they are printed."""
    return {name: round(value, 3) for name, value in values.items()}


def print_timeline(pair: Pair, request_id: str, heard: Heard) -> None:
    """Print what both daemons logged of one request, in ms since prefilld knew its first token."""
    lease_ids = {
        line["lease_id"]
        for line in pair.log("prefilld")
        if line.get("request_id") == request_id and "lease_id" in line
    }
    lines = [
        (line["monotonic_ns"], name, line)
        for name in ("prefilld", "decoded")
        for line in pair.log(name)
        if line.get("request_id") == request_id or line.get("lease_id") in lease_ids
    ]
    origin_ns = heard.first_token_ns
    lines += [(heard.token_ns[0], "client", {"event": "token 1"})]
    lines += [(heard.token_ns[1], "client", {"event": "token 2"})]
    lines += [(heard.sent_ns, "client", {"event": "sent"})]
    for when_ns, name, line in sorted(lines, key=lambda each: each[0]):
        extra = ""
        if "start_ns" in line:
            extra = " ".join(
                f"{key} {(line[key] - origin_ns) / 1e6:.3f}" for key in ("start_ns", "done_ns")
            )
        extra += "".join(
            f" {key.removesuffix('_us')} {value / 1e3:.3f}"
            for key, value in line.items()
            if "device" in key and key.endswith("_us") and value is not None
        )
        print(f"   {(when_ns - origin_ns) / 1e6:9.3f} {name:9}{line['event']} {extra}")
