"""Philox4x32-10: random numbers as a pure function of a counter and a key.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).  No state goes from one
number to the next, so any process that knows the key and the counter gets the same number: a
sampled token depends on neither the batch nor the daemon.  Triton's `tl.philox` is the same
function, so a kernel can agree with this one bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, in 32-bit fractions
WORD_MASK = 0xFFFFFFFF

UNIFORM_BITS = 23
"""A float32 holds 24 bits, and half a step is added so that 0 and 1 are never reached."""


Word = int | Tensor
"""In [0, 2^32); a tensor of them is int64."""


def philox(counter: tuple[Tensor, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Tensor, ...]:
    """Return the four output words for every counter.

    Args:
        counter: Four words, the first one a tensor of any shape; tensors among the others, and in
            `key`, broadcast to it.
        key: Two words.

    Returns:
        Four int64 tensors of that shape, in [0, 2^32).
    """
    # int64 is what torch multiplies everywhere.  A product of two words wraps around to the
    # right 64 bits; the shift is arithmetic, and the mask then drops the copies of the sign.
    c0, (c1, c2, c3) = counter[0], (torch.zeros_like(counter[0]) + word for word in counter[1:])
    k0, k1 = key
    for _ in range(NUM_ROUNDS):
        product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        # c1 and c3 keep the products' high halves until the end: masking c0 and c2 drops them.
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(WORD_MASK)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(WORD_MASK)
        c1, c3 = product1, product0
        k0, k1 = (k0 + KEY_STEPS[0]) & WORD_MASK, (k1 + KEY_STEPS[1]) & WORD_MASK
    return c0, c1 & WORD_MASK, c2, c3 & WORD_MASK


def uniform(indices: Tensor, *, position: int, seed: int) -> Tensor:
    """Return a number in (0, 1) for each index, keyed by the seed and the position.

    The counter is (index, position, 0, 0), the key the seed's low and high word; the number is
    made of the high bits of the first output word.

    Args:
        indices: [n] int64 in [0, 2^32).
        position: In [0, 2^32).
        seed: In [0, 2^64).

    Returns:
        [n] float32, multiples of 2^-24 that are neither 0 nor 1.
    """
    return _uniform(indices, position, seed & WORD_MASK, seed >> 32)


def uniform_rows(num_indices: int, *, positions: Tensor, seed_words: Tensor) -> Tensor:
    """Return for each row what `uniform` gives for the indices from 0 on, on the rows' device.

    Args:
        num_indices: Numbers a row.
        positions: [batch] int64 in [0, 2^32).
        seed_words: [batch, 2] int64 in [0, 2^32), each row a seed's low word and high word.

    Returns:
        [batch, num_indices] float32.
    """
    indices = torch.arange(num_indices, device=positions.device).expand(len(positions), -1)
    low, high = seed_words.unsqueeze(-1).unbind(1)
    return _uniform(indices, positions.unsqueeze(1), low, high)


def _uniform(indices: Tensor, position: Word, seed_low: Word, seed_high: Word) -> Tensor:
    first, *_ = philox((indices, position, 0, 0), (seed_low, seed_high))
    return ((first >> (32 - UNIFORM_BITS)).float() + 0.5) * 2.0**-UNIFORM_BITS
