"""The kernel of `shared.ops.triton.sampling`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Of the 31 bits of a distance, which is a float32 without a sign.
DIGIT_BITS = tl.constexpr(4)
NUM_DIGITS = tl.constexpr(16)
FIRST_SHIFT = tl.constexpr(28)


@triton.jit(do_not_specialize=["vocab_size"])
def sample_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    chosen: tl.tensor,
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    seeds: tl.tensor,
    positions: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    NOISE_SPAN: tl.constexpr,
    UNIFORM_BITS: tl.constexpr,
    TILE: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
) -> None:
    """Choose the token of one row."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * row_stride
    temperature = tl.load(temperatures + row)
    lane = tl.arange(0, TILE)

    # The likeliest token.  Lanes compare among themselves only once, at the end.
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        token = start + lane
        score = tl.load(scores + token, mask=token < vocab_size, other=float("-inf"))
        is_better = score > best
        best_id = tl.where(is_better, token, best_id)
        best = tl.where(is_better, score, best)
    highest = tl.max(best, 0)
    winner = tl.min(tl.where(best == highest, best_id, vocab_size), 0)

    if temperature > 0.0:
        # How far a logit lies below the best one, in units of the temperature.  Never negative,
        # so distances are ordered as the integers that their bits are.
        limit = tl.full([], 0x7F800000, tl.int32)
        top_k = tl.load(top_ks + row)
        if (top_k > 0) & (top_k < vocab_size):
            limit = _edge(
                scores, vocab_size, highest, temperature, limit, top_k.to(tl.float64), True, TILE
            )
        top_p = tl.load(top_ps + row)
        if top_p < 1.0:
            mass = tl.zeros([TILE], tl.float64)
            for start in range(0, vocab_size, TILE):
                distance = _distance(scores, start + lane, vocab_size, highest, temperature)
                is_kept = distance.to(tl.int32, bitcast=True) <= limit
                mass += tl.where(is_kept, tl.exp(-distance), 0.0).to(tl.float64)
            target = tl.sum(mass, 0) * top_p.to(tl.float64)
            limit = _edge(scores, vocab_size, highest, temperature, limit, target, False, TILE)

        seed = tl.load(seeds + row)
        position = tl.load(positions + row).to(tl.uint32)
        best = tl.full([TILE], float("-inf"), tl.float32)
        best_id = tl.full([TILE], 0, tl.int32)
        for start in range(0, vocab_size, TILE):
            token = start + lane
            distance = _distance(scores, token, vocab_size, highest, temperature)
            # Noise costs far more than a comparison, so those that cannot win get none.
            is_kept = (distance.to(tl.int32, bitcast=True) <= limit) & (distance <= NOISE_SPAN)
            if tl.max(is_kept.to(tl.int32), 0) > 0:
                counter = token.to(tl.uint32)
                zero = counter * 0
                word, _, _, _ = tl.philox(seed, counter, zero + position, zero, zero)
                uniform = (word >> (32 - UNIFORM_BITS)).to(tl.float32) + 0.5
                uniform *= 1.0 / (1 << UNIFORM_BITS)
                score = tl.where(is_kept, -tl.log(-tl.log(uniform)) - distance, float("-inf"))
                is_better = score > best
                best_id = tl.where(is_better, token, best_id)
                best = tl.where(is_better, score, best)
        winner = tl.min(tl.where(best == tl.max(best, 0), best_id, vocab_size), 0)
    tl.store(chosen + row, winner.to(tl.int64))


@triton.jit
def _distance(
    scores: tl.tensor,
    token: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
) -> tl.tensor:
    """Return how far tokens lie below the best one, infinitely far behind the last token."""
    score = tl.load(scores + token, mask=token < vocab_size, other=float("-inf"))
    # Rounded as the reference divides.
    return tl.div_rn(highest - score, temperature)


@triton.jit
def _edge(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    target: tl.tensor,
    IS_COUNT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the smallest distance up to which tokens within `limit` weigh `target` together.

    A token weighs 1 if they are counted, else its probability.  The distance is found digit by
    digit, the highest first: each pass weighs, for every value of a digit, the tokens whose higher
    digits are known to be the edge's.
    """
    lane = tl.arange(0, TILE)
    digits = tl.arange(0, NUM_DIGITS)
    prefix = tl.full([], 0, tl.int32)
    missing = target
    for index in range(FIRST_SHIFT // DIGIT_BITS + 1):
        shift = FIRST_SHIFT - index * DIGIT_BITS
        weights = tl.zeros([NUM_DIGITS], tl.float64)
        for start in range(0, vocab_size, TILE):
            token = start + lane
            distance = _distance(scores, token, vocab_size, highest, temperature)
            key = distance.to(tl.int32, bitcast=True)
            # In two steps, since a shift by all 32 bits is no shift.
            is_near = ((key >> shift) >> DIGIT_BITS) == ((prefix >> shift) >> DIGIT_BITS)
            is_near = is_near & (key <= limit) & (token < vocab_size)
            if tl.max(is_near.to(tl.int32), 0) > 0:
                if IS_COUNT:
                    weight = is_near.to(tl.float32)
                else:
                    weight = tl.where(is_near, tl.exp(-distance), 0.0)
                digit = (key >> shift) & (NUM_DIGITS - 1)
                is_digit = digit[None, :] == digits[:, None]
                weights += tl.sum(tl.where(is_digit, weight[None, :], 0.0), 1).to(tl.float64)
        reached = tl.cumsum(weights, 0)
        is_enough = (reached >= missing) & (weights > 0.0)
        # What rounding left of the last target may lie beyond the last token.
        last = tl.max(tl.where(weights > 0.0, digits, 0), 0)
        edge = tl.min(tl.where(is_enough, digits, last), 0)
        missing -= tl.sum(tl.where(digits < edge, weights, 0.0), 0)
        prefix = prefix | (edge << shift)
    return prefix
