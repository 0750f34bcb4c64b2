"""The kernel of `shared.ops.triton.sampling`, which says how it works and launches it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Of the 31 bits of a distance, which is a float32 without a sign.
DIGIT_BITS = tl.constexpr(4)
NUM_DIGITS = tl.constexpr(16)
FIRST_SHIFT = tl.constexpr(28)

INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit(do_not_specialize=["vocab_size", "row_stride"])
def sample_kernel(  # noqa: PLR0917 -- a launch passes pointers by position
    chosen: tl.tensor,
    logits: tl.tensor,
    is_greedy: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    log_min_ps: tl.tensor,
    seed_words: tl.tensor,
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
    winner = tl.min(tl.where(best == highest, best_id, vocab_size - 1), 0)

    if tl.load(is_greedy + row) == 0:
        # How far a logit lies below the best one, in units of the temperature.  Never negative,
        # so distances are ordered as the integers that their bits are.
        temperature = tl.load(temperatures + row)
        limit = tl.full([], INFINITY_BITS, tl.int32)
        top_k = tl.load(top_ks + row)
        if top_k < vocab_size:
            limit = _top_k_edge(scores, vocab_size, highest, temperature, top_k, TILE)
        top_p = tl.load(top_ps + row)
        target = tl.full([], float("inf"), tl.float64)
        if top_p < 1.0:
            everything = _mass(scores, vocab_size, highest, temperature, limit, TILE)
            target = everything * top_p
        nucleus_limit = limit
        farthest = tl.minimum(-tl.load(log_min_ps + row), NOISE_SPAN)
        limit = tl.minimum(limit, farthest.to(tl.int32, bitcast=True))

        seed = tl.load(seed_words + 2 * row).to(tl.uint64)
        seed = seed | (tl.load(seed_words + 2 * row + 1).to(tl.uint64) << 32)
        position = tl.load(positions + row).to(tl.uint32)
        is_searching = 1
        while is_searching > 0:
            winner = _draw(
                scores,
                vocab_size,
                highest,
                temperature,
                limit,
                seed,
                position,
                UNIFORM_BITS,
                TILE,
            )
            # The edge of top-p need not be known: if the winner of more tokens lies inside it,
            # the winner of those inside is the same.  If not, nothing that far out is inside.
            is_searching = 0
            if top_p < 1.0:
                distance = tl.div_rn(highest - tl.load(scores + winner), temperature)
                nearer = tl.minimum(distance.to(tl.int32, bitcast=True) - 1, nucleus_limit)
                mass = _mass(scores, vocab_size, highest, temperature, nearer, TILE)
                if mass >= target:
                    limit = nearer
                    is_searching = 1
    tl.store(chosen + row, winner.to(tl.int64))


@triton.jit
def _draw(  # noqa: PLR0917 -- as above
    scores: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    UNIFORM_BITS: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the token of the largest logit with noise, among those no farther than `limit`."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0, tl.int32)
    for start in range(0, vocab_size, TILE):
        token = start + lane
        distance = _distance(scores, token, vocab_size, highest, temperature)
        is_kept = distance.to(tl.int32, bitcast=True) <= limit
        # Noise costs far more than a comparison, so tiles that cannot win get none.
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
    return tl.min(tl.where(best == tl.max(best, 0), best_id, vocab_size - 1), 0)


@triton.jit
def _mass(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    limit: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the sum of `exp(-distance)` over tokens no farther than `limit`, in float64."""
    lane = tl.arange(0, TILE)
    mass = tl.zeros([TILE], tl.float64)
    for start in range(0, vocab_size, TILE):
        distance = _distance(scores, start + lane, vocab_size, highest, temperature)
        is_kept = distance.to(tl.int32, bitcast=True) <= limit
        mass += tl.where(is_kept, tl.exp(-distance), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


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
def _top_k_edge(
    scores: tl.tensor,
    vocab_size: tl.tensor,
    highest: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """Return the bits of the distance of the k-th nearest token.

    Found digit by digit, the highest first: each pass counts, for every value of a digit, the
    tokens whose higher digits are known to be the edge's.
    """
    lane = tl.arange(0, TILE)
    digits = tl.arange(0, NUM_DIGITS)
    prefix = tl.full([], 0, tl.int32)
    missing = top_k.to(tl.int32)
    for index in range(FIRST_SHIFT // DIGIT_BITS + 1):
        shift = FIRST_SHIFT - index * DIGIT_BITS
        counts = tl.zeros([NUM_DIGITS], tl.int32)
        for start in range(0, vocab_size, TILE):
            token = start + lane
            distance = _distance(scores, token, vocab_size, highest, temperature)
            key = distance.to(tl.int32, bitcast=True)
            # In two steps, since a shift by all 32 bits is no shift.
            is_near = ((key >> shift) >> DIGIT_BITS) == ((prefix >> shift) >> DIGIT_BITS)
            is_near = is_near & (token < vocab_size)
            if tl.max(is_near.to(tl.int32), 0) > 0:
                digit = tl.where(is_near, (key >> shift) & (NUM_DIGITS - 1), NUM_DIGITS)
                counts += tl.sum((digit[None, :] == digits[:, None]).to(tl.int32), 1)
        edge = tl.min(tl.where(tl.cumsum(counts, 0) >= missing, digits, NUM_DIGITS - 1), 0)
        missing -= tl.sum(tl.where(digits < edge, counts, 0), 0)
        prefix = prefix | (edge << shift)
    return prefix
