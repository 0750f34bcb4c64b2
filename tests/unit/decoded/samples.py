"""Messages and streams that the tests of decoded share."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from decoded.stream import ClientStream
from protocol import messages as wire
from protocol.codec import encode_message
from protocol.states import Role
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import socketpair

if TYPE_CHECKING:
    import socket

EPOCH = bytes(range(16))

STATE = wire.RequestState(
    id="r",
    prompt_tokens=10,
    cached_tokens=0,
    ids=[41],
    delivered=1,
    resumed=0,
    max_tokens=6,
    sampling=wire.Sampling(seed=1),
    stop=[],
    stop_ids=[0],
    stream=True,
    arrived_ns=1,
    started_ns=2,
    first_token_ns=3,
)

HANDOFF = wire.Handoff(
    epoch=EPOCH,
    lease=1,
    slot=0,
    generation=1,
    blocks=[7],
    num_tokens=10,
    total_blocks=1,
    request=STATE,
    sent_ns=4,
)
"""One block of 16 tokens, of which 10 are a prompt; 6 more may follow."""

CHUNK = wire.Chunk(epoch=EPOCH, lease=1, slot=0, generation=1, first=0, blocks=[7], total_blocks=2)


def changed(message: Any, **changes: Any) -> Any:  # noqa: ANN401 - any message, any field
    """Return a message with other values, those of `request` among them."""
    if isinstance(message, wire.Handoff):
        state = {key: changes.pop(key) for key in list(changes) if hasattr(STATE, key)}
        changes["request"] = msgspec.structs.replace(message.request, **state)
    return msgspec.structs.replace(message, **changes)


class Stream:
    """A handed-over connection, and what its owner was told."""

    def __init__(
        self,
        *,
        residue: bytes = b"",
        is_streaming: bool = True,
        send_buffer_bytes: int | None = None,
        now_s: float = 0,
    ) -> None:
        ours, self.theirs = socketpair(send_buffer_bytes)
        self.num_cancels = self.num_closed = 0
        self.fd = ours.detach()
        self.stream = ClientStream(
            self.fd,
            residue=residue,
            is_streaming=is_streaming,
            loop=asyncio.get_running_loop(),
            on_cancel=self._on_cancel,
            on_closed=self._on_closed,
            now_s=now_s,
        )

    def _on_cancel(self) -> None:
        self.num_cancels += 1

    def _on_closed(self) -> None:
        self.num_closed += 1

    def user(self) -> Recorder:
        """Begin to read at the other end, as a client whose request was accepted."""
        return streaming_user(self.theirs)


def streaming_user(sock: socket.socket) -> Recorder:
    """Return a client that has asked and was accepted on another connection's account."""
    user = Recorder(sock, Role.CLIENT)
    connection = user.socket.connection
    connection.send(wire.Generate(prompt=[1]))
    accepted = wire.Accepted(id="r", seed=1, prompt_tokens=1, cached_tokens=0, fingerprint="f")
    connection.receive_data(encode_message(accepted))
    assert connection.next_event() == accepted
    return user.start()
