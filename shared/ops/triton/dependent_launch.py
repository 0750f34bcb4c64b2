"""Launches that may begin before the launch ahead of them has ended (Hopper and later).

A kernel whose `IS_DEPENDENT` is set says at once that the next launch may come, so that the next
one's thread blocks fill the multiprocessors as its own run out.  It then may read only what no
launch of the same step writes (weights, block tables, keys and values of earlier tokens) until
`gdc_wait` has returned, which is when the launch ahead is complete, and by the same rule all those
before it.  What it writes, it writes behind the wait.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

FIRST_CAPABILITY = (9, 0)


def dependent_launch(device: torch.device) -> dict[str, Any]:
    """Return the keyword arguments of a launch on a device: `IS_DEPENDENT`, and what it needs."""
    if device.type != "cuda" or not _is_capable(device):
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


@cache
def _is_capable(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY
