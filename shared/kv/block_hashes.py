"""Names for the contents of whole blocks: a chained hash each.  Pure.

A block's keys and values depend on its own tokens, on every token before them, and on what computed
them.  So does its hash: it is made of the hash of the block before, of the block's token ids, and
at the root of a salt, which stands for the model, the layout and the incarnation of the pool.
Equal hashes mean equal contents, of the whole prefix up to and including the block.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

HASH_BYTES = 32
"""Whoever sends prompts chooses what is hashed: 256 bits leave nobody two prompts of one hash."""

_ID_FORMAT = "I"
"""Each token id takes 4 bytes, so no two lists of ids are the same bytes."""


def root_hash(*, fingerprint: str, epoch: bytes) -> bytes:
    """Return what the first block of every prefix is chained to.

    Args:
        fingerprint: Of everything that decides keys and values but the tokens.
        epoch: Of the pool: a hash means nothing in another one.
    """
    return hashlib.blake2b(epoch + fingerprint.encode(), digest_size=HASH_BYTES).digest()


def block_hashes(token_ids: Sequence[int], *, block_size: int, root: bytes) -> tuple[bytes, ...]:
    """Return the hash of each whole block of a sequence, the first block's first.

    Args:
        token_ids: The sequence, from its first token; each is at least 0 and below 2^32.
        block_size: Tokens a block; what is left over at the end has no hash.
        root: What the first block is chained to.
    """
    num_blocks = len(token_ids) // block_size
    num_bytes = block_size * struct.calcsize(_ID_FORMAT)
    packed = struct.pack(
        f"<{num_blocks * block_size}{_ID_FORMAT}", *token_ids[: num_blocks * block_size]
    )
    hashes, parent = [], root
    for start in range(0, num_blocks * num_bytes, num_bytes):
        chained = parent + packed[start : start + num_bytes]
        parent = hashlib.blake2b(chained, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return tuple(hashes)
