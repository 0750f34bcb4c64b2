"""Tests of decoded/refusals.py: how a link is refused."""

from __future__ import annotations

import pytest

from decoded.refusals import (
    contradiction,
    descriptors_lost,
    foreign_backend,
    link_busy,
    too_little_memory,
    too_slow,
    unmappable,
)
from protocol import messages as wire
from protocol.codec import validate
from protocol.errors import CODES
from shared.kv.errors import MappingFault


@pytest.mark.parametrize("fault", list(MappingFault))
def test_every_fault_of_a_mapping_has_a_code_and_a_cure(fault: MappingFault) -> None:
    refuse = unmappable("what the driver says", fault)
    validate(refuse)
    assert refuse.code in CODES
    assert refuse.ours == "what the driver says"
    assert refuse.message
    expected = {
        MappingFault.HANDLE: "handle",
        MappingFault.SELF: "same-pid",
        MappingFault.PEER: "peer-access",
        MappingFault.EVENTS: "shm",
    }
    assert refuse.code == expected.get(fault, "size")


@pytest.mark.parametrize(
    ("refuse", "code", "said"),
    [
        (link_busy(pid=42), "link-busy", "prefilld 42 has the link"),
        (contradiction("block 9 is not there"), "invalid-message", "block 9 is not there"),
        (descriptors_lost(), "fd-lost", "LimitNOFILE"),
        (foreign_backend(), "backend", "[pool] backend"),
        (unmappable("the pool has 3 bytes"), "size", "the pool has 3 bytes"),
        (too_little_memory("7 bytes are free", gpu="GPU-a"), "memory", "free (on GPU-a)"),
        (too_slow(2.5, 0.123_456), "slow-link", "min_bandwidth_gb_s"),
    ],
)
def test_later_refusals_fit_the_wire_and_say_what_to_do(
    refuse: wire.Refuse, code: str, said: str
) -> None:
    validate(refuse)
    assert refuse.code == code
    assert code in CODES
    assert said in " ".join((refuse.ours, refuse.theirs, refuse.message))


def test_a_slow_link_is_told_with_both_rates() -> None:
    refuse = too_slow(2.5, 0.123_456)
    assert ("2.5" in refuse.ours, refuse.theirs) == (True, "0.123")
