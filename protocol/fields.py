"""The types of the messages' fields: what a count, an epoch, a list of token ids may be."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocol import limits

Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Nanoseconds = Annotated[int, Meta(ge=0, le=(1 << 62))]
"""A reading of CLOCK_MONOTONIC in nanoseconds; both daemons share that clock."""
Milliseconds = Annotated[float, Meta(ge=0.0, le=1e15)]
TokenId = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]
TokenIds = Annotated[list[TokenId], Meta(max_length=limits.MAX_TOKENS)]
BlockId = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
"""An index into the pool.  Block 0 is reserved for the proof at hand-shake."""
BlockIds = Annotated[list[BlockId], Meta(max_length=limits.MAX_BLOCKS)]
Epoch = Annotated[bytes, Meta(min_length=limits.EPOCH_BYTES, max_length=limits.EPOCH_BYTES)]
LeaseId = Annotated[int, Meta(ge=1, le=(1 << 62))]
Generation = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Slot = Annotated[int, Meta(ge=0, lt=limits.MAX_CONTROL_SLOTS)]
Seed = Annotated[int, Meta(ge=0, le=limits.MAX_SEED)]
RequestId = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+\Z")]
ShortText = Annotated[str, Meta(max_length=4096)]
Penalty = Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Logprob = Annotated[float, Meta(ge=-1e39, le=0.0)]
"""The natural logarithm of a probability, from float32."""
NumLogprobs = Annotated[int, Meta(ge=0, le=limits.MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=limits.MAX_STOP_STRING_CHARACTERS)]


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """What every message is: immutable, closed to unknown fields, named by its `type`."""


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct inside a message; it has no `type` of its own."""
