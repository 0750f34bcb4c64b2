"""The shape of a KV pool: how many bytes a block has and where in it each number lies.

A pool is one allocation of shape `[num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size,
head_dim]`, row-major.  The block comes first, so a block is one contiguous run of bytes and
moving it is one copy.  Both daemons must agree on everything but the number of blocks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from shared.kv.errors import LayoutError

DTypeName = Literal["float32", "bfloat16", "float16"]
"""The element types a pool may have, by their names in torch."""

ITEM_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}

RESERVED_BLOCK = 0
"""Holds the proof at hand-shake and never a request's cache."""

POOL_ALIGNMENT_BYTES = 2 << 20
"""A pool's size is a multiple of 2 MiB.

The CUDA driver places smaller allocations inside larger ones and an IPC handle opens the whole
of those; on the CPU it is the size of a huge page.
"""

MAX_BLOCKS = (1 << 31) - 1
"""Block tables are int32 on the device, and their sign says which pool an entry is from."""

MAX_POOL_BYTES = (1 << 63) - 1
"""Offsets into a pool are int64."""

ORDER = "block,layer,kv,head,token,dim"
"""The order of the dimensions, as it enters the fingerprint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """The shape and the element type of a KV pool.

    Raises:
        LayoutError: A field is not a positive integer, `dtype` is not one of `ITEM_BYTES`,
            there is no block beside the reserved one, or the pool is too large to address.
    """

    num_blocks: int
    """Blocks of the pool, the reserved one included."""
    num_layers: int
    num_kv_heads: int
    block_size: int
    """Tokens in a block."""
    head_dim: int
    dtype: DTypeName

    def __post_init__(self) -> None:
        """Refuse a shape that no pool can have."""
        for field in ("num_blocks", "num_layers", "num_kv_heads", "block_size", "head_dim"):
            value = getattr(self, field)
            # A bool is an int to Python, and `True` layers is somebody's mistake.
            if type(value) is not int or value < 1:
                raise LayoutError(field=field, value=value, wants="a positive integer")
        if self.dtype not in ITEM_BYTES:
            raise LayoutError(field="dtype", value=self.dtype, wants=f"one of {[*ITEM_BYTES]}")
        if not RESERVED_BLOCK + 2 <= self.num_blocks <= MAX_BLOCKS:
            raise LayoutError(
                field="num_blocks",
                value=self.num_blocks,
                wants=f"2 to {MAX_BLOCKS}, of which block {RESERVED_BLOCK} is reserved",
            )
        if self.pool_bytes > MAX_POOL_BYTES:
            raise LayoutError(
                field="pool_bytes", value=self.pool_bytes, wants=f"at most {MAX_POOL_BYTES}"
            )

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        """`(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)`."""
        return (
            self.num_blocks,
            self.num_layers,
            2,
            self.num_kv_heads,
            self.block_size,
            self.head_dim,
        )

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.token_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes that the blocks fill; what is left up to `pool_bytes` is padding."""
        return self.num_blocks * self.block_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes to allocate and map: `kv_bytes` rounded up to `POOL_ALIGNMENT_BYTES`."""
        return -(-self.kv_bytes // POOL_ALIGNMENT_BYTES) * POOL_ALIGNMENT_BYTES

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens; the last may be partly filled.

        Raises:
            ValueError: `num_tokens` is negative.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens is {num_tokens}; it must not be negative")
        return -(-num_tokens // self.block_size)

    def with_num_blocks(self, num_blocks: int) -> KVLayout:
        """Return the layout of a pool of another size whose blocks are the same."""
        return dataclasses.replace(self, num_blocks=num_blocks)

    def fields(self) -> dict[str, str | int]:
        """Return what the fingerprint is made of: everything but the number of blocks.

        Two pools whose fields are equal can exchange blocks.
        """
        return {
            "kv_order": ORDER,
            "kv_num_layers": self.num_layers,
            "kv_num_kv_heads": self.num_kv_heads,
            "kv_block_size": self.block_size,
            "kv_head_dim": self.head_dim,
            "kv_dtype": self.dtype,
        }
