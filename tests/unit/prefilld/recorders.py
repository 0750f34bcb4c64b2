"""Who listens to prefilld's parts in these tests, and the requests that pass through them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from prefilld.clients import Client, ClientHandler
from prefilld.request import Prompt, Request
from protocol import messages as wire
from protocol.limits import DEFAULT_MAX_REQUEST_BYTES
from protocol.states import Role
from shared.kv.allocator import BlockAllocator, BlockState
from shared.kv.holds import Hold
from shared.model.answer import AnswerAssembler
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import socketpair, until

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterable, Sequence

    from prefilld.handoff import HandoffDesk
    from protocol.closing import CloseReason
    from shared.kv.control_page import ControlPage

EPOCH = bytes(range(16))
BLOCK_SIZE = 4


class Handler:
    """Keeps what clients did."""

    def __init__(self) -> None:
        self.requests: list[wire.Message] = []
        self.num_cancels = 0
        self.num_flushed = 0
        self.num_handed_over = 0
        self.gone: list[CloseReason] = []

    def on_request(self, _client: Client, message: wire.Message) -> None:
        self.requests.append(message)

    def on_cancel(self, _client: Client) -> None:
        self.num_cancels += 1

    def on_flushed(self, _client: Client) -> None:
        self.num_flushed += 1

    def on_gone(self, _client: Client, reason: CloseReason) -> None:
        self.gone.append(reason)

    def on_handed_over(self, _client: Client) -> None:
        self.num_handed_over += 1


class Link:
    """An open link that takes everything."""

    def __init__(self) -> None:
        self.sent: list[wire.Message] = []
        self.fds: list[tuple[int, ...]] = []

    def send(self, message: wire.Message, fds: Sequence[int] = ()) -> None:
        self.sent.append(message)
        self.fds.append(tuple(fds))

    def of(self, kind: type[wire.Message]) -> list[wire.Message]:
        return [message for message in self.sent if isinstance(message, kind)]

    @property
    def handed_over(self) -> list[str]:
        """Ids of the requests that were handed over, in order."""
        return [message.request.id for message in self.sent if isinstance(message, wire.Handoff)]


class Owner:
    """Keeps what became of requests; like `Serving`, it puts rejected ones back."""

    def __init__(self, desk: HandoffDesk) -> None:
        self._desk = desk
        self.num_wakes = 0
        self.adopted_ids: list[str] = []
        self.rejections: list[tuple[str, str, str]] = []

    def wake(self) -> None:
        self.num_wakes += 1

    def adopted(self, request: Request) -> None:
        self.adopted_ids.append(request.id)

    def rejected(self, request: Request, code: str, message: str) -> None:
        self.rejections.append((request.id, code, message))
        self._desk.ready(request)


class FencedAllocator(BlockAllocator):
    """Refuses to let go of a lent block while the control page still lets it be read."""

    def __init__(self, num_blocks: int, page: ControlPage) -> None:
        super().__init__(num_blocks)
        self._page = page
        self.num_checked = 0

    def move(self, blocks: Iterable[int], to: BlockState) -> None:
        blocks = list(blocks)
        if to is BlockState.LEASED:
            assert not any(self._readable()), "one lease at a time in these tests"
        elif any(self.state(block) is BlockState.LEASED for block in blocks):
            assert not any(self._readable()), f"{blocks} go to {to.value} before the revocation"
            self.num_checked += 1
        super().move(blocks, to)

    def _readable(self) -> list[bool]:
        return [self._page.read(slot) % 2 == 1 for slot in range(self._page.num_slots)]


def hold_of(blocks: Sequence[int]) -> Hold:
    """Return a hold on blocks of one's choice, of which nobody keeps books."""
    return Hold(blocks=tuple(blocks), hashes=(), cached_tokens=0, num_listed=0)


def new_client(
    handler: ClientHandler, *, now_s: float = 0.0, send_buffer_bytes: int | None = None
) -> tuple[Client, socket.socket]:
    """Return a client's connection as prefilld has it, and the socket at its other end."""
    ours, theirs = socketpair(send_buffer_bytes)
    client = Client(
        ours,
        loop=asyncio.get_running_loop(),
        handler=handler,
        max_request_bytes=DEFAULT_MAX_REQUEST_BYTES,
        now_s=now_s,
    )
    return client, theirs


def user_of(theirs: socket.socket) -> Recorder:
    """Return the user at the other end of a client's connection."""
    return Recorder(theirs, Role.CLIENT).start()


def accepted(request_id: str = "r") -> wire.Accepted:
    return wire.Accepted(id=request_id, seed=1, prompt_tokens=1, cached_tokens=0, fingerprint="f")


async def streaming_client(
    handler: Handler | None = None, *, send_buffer_bytes: int | None = None
) -> tuple[Client, Recorder]:
    """Return a connection whose request was accepted, and its user."""
    handler = handler or Handler()
    client, theirs = new_client(handler, send_buffer_bytes=send_buffer_bytes)
    user = user_of(theirs)
    user.socket.send(wire.Generate(prompt=[1]))
    await until(lambda: handler.requests)
    client.send(accepted())
    await user.until_received(wire.Accepted)
    return client, user


def clog(client: Client) -> None:
    """Send to a client that does not read until bytes have to wait."""
    while client.is_flushed:
        client.send(wire.Tokens(index=0, ids=[1], text="x" * 8_000))


def new_request(
    client: Client,
    *,
    request_id: str = "r",
    num_tokens: int = 10,
    start_blocks: int = 5,
    arrived_ns: int = 1,
    max_tokens: int = 8,
    stream: bool = True,
) -> Request:
    ids = [10 + index for index in range(num_tokens)]
    return Request(
        id=request_id,
        client=client,
        prompt=Prompt(
            ids=ids,
            resumed_ids=[],
            max_tokens=max_tokens,
            sampling=wire.Sampling(seed=1),
            stop=["end"],
            stop_ids=[0],
            stream=stream,
            num_blocks=-(-num_tokens // BLOCK_SIZE),
            start_blocks=start_blocks,
            total_blocks=start_blocks,
        ),
        token_ids=ids,
        arrived_ns=arrived_ns,
        deadline_s=1e9,
        assembler=AnswerAssembler(lambda _: b"x", max_tokens=max_tokens),
    )
