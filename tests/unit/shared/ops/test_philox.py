"""Philox4x32-10 against Random123's published vectors."""

from __future__ import annotations

import math

import pytest
import torch

from shared.ops.philox import WORD_MASK, philox, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (WORD_MASK,) * 4,
            (WORD_MASK,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """A kernel on a GPU, written by others, must be able to agree bit for bit."""
    first, *others = counter
    words = philox((torch.tensor([first]), *others), key)
    assert tuple(int(word) for word in words) == expected


def test_a_vector_of_counters_gives_what_each_gives_alone() -> None:
    """Which neighbours a counter has must not matter."""
    indices = torch.tensor([0, 1, 49151, WORD_MASK])
    together = philox((indices, 7, 0, 0), (1, 2))
    for place, index in enumerate(indices.tolist()):
        alone = philox((torch.tensor(index), 7, 0, 0), (1, 2))
        assert [int(word[place]) for word in together] == [int(word) for word in alone]


def test_uniform_is_keyed_by_all_three() -> None:
    """Another seed (in either word), position or index is another number."""
    indices = torch.tensor([3, 4])
    numbers = [
        uniform(indices, position=position, seed=seed)
        for position, seed in [(5, 1), (6, 1), (5, 2), (5, 1 + (1 << 40))]
    ]
    assert len({float(number) for pair in numbers for number in pair}) == 8


def test_the_noise_of_every_number_is_finite() -> None:
    """The smallest and the largest uniform are 2^-24 and 1 - 2^-24: log(-log(u)) exists."""
    numbers = uniform(torch.arange(1 << 16), position=0, seed=0)
    assert float(numbers.min()) > 0
    assert float(numbers.max()) < 1
    for edge in (2.0**-24, 1 - 2.0**-24):
        exact = torch.tensor(edge)
        assert float(exact) == edge
        assert math.isfinite(float(exact.log().neg().log()))


def test_uniform_is_uniform() -> None:
    """Chi-square over 64 bins: 63 degrees of freedom, far beyond 120 at one in 100,000."""
    counts = torch.histc(uniform(torch.arange(1 << 16), position=9, seed=3), 64, 0, 1)
    expected = (1 << 16) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120
