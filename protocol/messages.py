"""Every message of the protocol, and who may say which to whom.

A message is one msgpack map whose `type` names its struct.  Unknown types, unknown fields,
wrong types and values out of range are refused as a whole; nothing is coerced.  The structs are
in `client_messages.py`, `timings.py` and `link_messages.py`, the types of their fields in
`fields.py`; `README.md` beside this file lists them all and is generated from them.
"""

from __future__ import annotations

from typing import get_args

from protocol.client_messages import (
    Accepted,
    Cancel,
    ChatMessage,
    Check,
    Checked,
    End,
    Error,
    Generate,
    LogitBias,
    Metrics,
    MetricsRequest,
    Resume,
    Sampling,
    Status,
    StatusRequest,
    TokenLogprob,
    Tokens,
    Usage,
)
from protocol.fields import Message, Part
from protocol.link_messages import (
    Abort,
    Adopt,
    Bye,
    Chunk,
    Credits,
    CreditUpdate,
    Drain,
    FirstStep,
    Handoff,
    Hello,
    Instance,
    LeaseMessage,
    Map,
    Mapped,
    NoChunk,
    Ping,
    Pong,
    Refuse,
    Reject,
    Release,
    RequestState,
    Welcome,
)
from protocol.timings import DeviceTimings, HandoffTimings, Timings

__all__ = [
    "MESSAGE_TYPES",
    "Abort",
    "Accepted",
    "Adopt",
    "Bye",
    "Cancel",
    "ChatMessage",
    "Check",
    "Checked",
    "Chunk",
    "CreditUpdate",
    "Credits",
    "DeviceTimings",
    "Drain",
    "End",
    "Error",
    "FirstStep",
    "FromDaemon",
    "Generate",
    "Handoff",
    "HandoffTimings",
    "Hello",
    "Instance",
    "LeaseMessage",
    "LinkToDecoded",
    "LinkToPrefilld",
    "LogitBias",
    "Map",
    "Mapped",
    "Message",
    "Metrics",
    "MetricsRequest",
    "NoChunk",
    "Part",
    "Ping",
    "Pong",
    "Refuse",
    "Reject",
    "Release",
    "RequestState",
    "Resume",
    "Sampling",
    "Status",
    "StatusRequest",
    "Timings",
    "ToDecoded",
    "ToPrefilld",
    "TokenLogprob",
    "Tokens",
    "Usage",
    "Welcome",
    "num_descriptors",
]

# --- which messages may arrive where -------------------------------------------------------

ToPrefilld = Generate | Check | Cancel | StatusRequest | MetricsRequest
"""What prefilld accepts from a client."""

ToDecoded = Cancel | StatusRequest | MetricsRequest
"""What decoded accepts from a client; CANCEL only on a connection that was handed over."""

FromDaemon = Accepted | Tokens | End | Error | Checked | Status | Metrics
"""What a client accepts from either daemon."""

LinkToDecoded = Hello | Map | Chunk | Handoff | Abort | Ping | Pong | Refuse | Bye
"""What decoded accepts on the link."""

LinkToPrefilld = (
    Welcome
    | Refuse
    | Error
    | Mapped
    | NoChunk
    | Adopt
    | Reject
    | Release
    | CreditUpdate
    | Ping
    | Pong
    | Drain
    | Bye
)
"""What prefilld accepts on the link; ERROR only while decoded does not know who connected."""

MESSAGE_TYPES: dict[str, type[Message]] = {
    str(kind.__struct_config__.tag): kind
    for union in (ToPrefilld, ToDecoded, FromDaemon, LinkToDecoded, LinkToPrefilld)
    for kind in get_args(union)
}
"""Every message by its `type`."""


def num_descriptors(message: Message) -> int:
    """Return how many descriptors ride on this message's frame.

    HANDOFF carries the client's connection; MAP the control page, and before it the pool where
    the pool is a memfd and not a CUDA handle.
    """
    if isinstance(message, Handoff):
        return 1
    if isinstance(message, Map):
        return 1 if message.pool_handle else 2
    return 0
