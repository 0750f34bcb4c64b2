"""Which devices the tests and measurements of a pair use: two GPUs where there are two."""

from __future__ import annotations

import os

import torch


def pair_devices() -> tuple[str, str]:
    """Return prefilld's device and decoded's.

    `KVPAIR_TEST_DEVICES=cpu,cpu` has tests of GPUs tried on a machine without one: all but what
    only a GPU can show.
    """
    chosen = os.environ.get("KVPAIR_TEST_DEVICES")
    if chosen is not None:
        prefilld, _, decoded = chosen.partition(",")
        return prefilld, decoded or prefilld
    return "cuda:0", "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


def device_index(device: str) -> int | None:
    """Return a GPU's number, or None for the CPU."""
    return None if device == "cpu" else int(device.removeprefix("cuda:"))
