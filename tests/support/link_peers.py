"""Stand-ins for one side of the link, each played by the test against the real other side.

They use the real pool, control page, model and messages, and none of the daemons' own code: what
they leave out, double or contradict is the test's choice.
"""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from msgspec.structs import replace

from protocol.client_messages import Sampling
from protocol.limits import EPOCH_BYTES, VERSION
from protocol.messages import (
    Chunk,
    Credits,
    Handoff,
    Hello,
    Map,
    Mapped,
    Message,
    RequestState,
    Welcome,
)
from shared.config.schema import Config, DecodedConfig, ModelConfig, PrefilldConfig
from shared.daemon.devices import CPU_DEVICE, Device
from shared.daemon.instance import this_instance
from shared.daemon.model_host import ModelHost, load_model_host
from shared.engine.batch import SequenceStep
from shared.engine.runner import ModelRunner
from shared.kv.control_page import ControlPage
from shared.kv.cuda_ipc import CudaIpcPool
from shared.kv.memfd import MemfdPool
from shared.kv.proof import write_pattern
from shared.ops.sampling import SamplingParams
from tests.support.raw_peer import RawPeer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

NUM_BLOCKS = 64
NUM_SLOTS = 16
PROOF_BYTES = 256
PLENTY = Credits(free_blocks=1 << 20, free_sequences=1 << 10, queue_depth=0, seen=0)


def load_host(model_path: Path, device: Device = CPU_DEVICE) -> ModelHost:
    """Load the model that the daemon under test serves, with the same configuration."""
    config = Config(
        model=ModelConfig(path=str(model_path)),
        prefilld=PrefilldConfig(socket="/unused"),
        decoded=DecodedConfig(socket="/unused"),
    )
    return load_model_host(config, num_blocks=NUM_BLOCKS, device=device)


def credits_after(seen: int) -> Credits:
    """Return room for everything, counted after `seen` reservations."""
    return replace(PLENTY, seen=seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A prompt in the stand-in's pool, and the right to read it."""

    lease_id: int
    slot: int
    generation: int
    blocks: list[int]
    prompt_ids: list[int]
    first_id: int
    """The token that the prompt's last position gave."""


class FakePrefilld:
    """prefilld as far as decoded can tell: a real pool, filled by the real model.

    Args:
        decoded_socket: Where the real decoded listens.
        host: What it serves.
        fill: What the pool holds before a prompt is written.
        device: Where the host's weights are, and the pool is to be.
    """

    def __init__(
        self,
        decoded_socket: Path,
        host: ModelHost,
        *,
        fill: float | None = None,
        device: Device = CPU_DEVICE,
    ) -> None:
        self._path, self.host, self.device = decoded_socket, host, device
        self.layout = host.layout.with_num_blocks(NUM_BLOCKS)
        self.pool = (
            MemfdPool.create(self.layout, fill=fill)
            if device.index is None
            else CudaIpcPool.create(self.layout, device=device.index, fill=fill)
        )
        self.page = ControlPage.create(NUM_SLOTS)
        self.epoch = os.urandom(EPOCH_BYTES)
        self._runner = ModelRunner(host.model, self.pool.kv, self.layout)
        self._next_lease = 1
        self._next_block = 1
        self._peer: RawPeer | None = None

    @property
    def link(self) -> RawPeer:
        """The present connection."""
        assert self._peer is not None, "connect first"
        return self._peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the link and the pool."""
        if self._peer is not None:
            self._peer.close()
        del self._runner
        self.pool.close()
        self.page.close()

    # --- hand-shake ------------------------------------------------------------------------

    def connect(self) -> RawPeer:
        """Open a connection; one that was open before is closed."""
        if self._peer is not None:
            self._peer.close()
        self._peer = RawPeer.connect(self._path)
        return self._peer

    def hello(self, **changes: Any) -> Hello:  # noqa: ANN401 - fields of any type
        """Return the HELLO that decoded accepts, with `changes`."""
        hello = Hello(
            version=VERSION,
            instance=this_instance(),
            epoch=self.epoch,
            backend="memfd" if self.device.index is None else "cuda",
            device=self.device.name,
            fingerprint=self.host.fingerprint,
            fields=self.host.fields,
        )
        return replace(hello, **changes)

    def greet(self, **changes: Any) -> Welcome:  # noqa: ANN401 - fields of any type
        """Connect and say HELLO, with `changes`; return WELCOME."""
        self.connect().send(self.hello(**changes))
        return self.link.expect(Welcome)

    def map(self, **changes: Any) -> Map:  # noqa: ANN401 - fields of any type
        """Return the MAP that describes this pool, with `changes`."""
        described = Map(
            pool_bytes=self.layout.pool_bytes,
            offset=0,
            num_blocks=NUM_BLOCKS,
            control_slots=NUM_SLOTS,
            proof_bytes=PROOF_BYTES,
        )
        if isinstance(self.pool, CudaIpcPool):
            export = self.pool.export()
            described = replace(
                described,
                offset=export.offset,
                pool_handle=export.handle,
                event_handles=list(export.event_handles),
            )
        return replace(described, **changes)

    def offer(self, described: Map) -> None:
        """Send a MAP with the descriptors that go with it: a memfd's pool, and the page."""
        fds = [self.pool.export()] if isinstance(self.pool, MemfdPool) else []
        fds.append(self.page.export())
        try:
            self.link.send(described, fds=fds)
        finally:
            for fd in fds:
                os.close(fd)

    def open(self) -> Mapped:
        """Bring a link up, and check that decoded reads what is written here."""
        self.greet()
        digest = write_pattern(self.pool, os.urandom(PROOF_BYTES))
        self.offer(self.map())
        mapped = self.link.expect(Mapped)
        assert mapped.digest == digest
        return mapped

    # --- requests --------------------------------------------------------------------------

    def prefill(self, prompt_ids: Sequence[int], *, slot: int = 0) -> Lease:
        """Compute a prompt into fresh blocks and lend them."""
        num_blocks = self.layout.num_blocks_for(len(prompt_ids))
        first = self._next_block
        self._next_block += num_blocks
        blocks = list(range(first, first + num_blocks))
        step = SequenceStep(
            token_ids=prompt_ids, start_position=0, block_table=blocks, sampling=SamplingParams()
        )
        (first_id,) = self._runner.execute([step]).token_ids
        assert first_id is not None
        lease_id, self._next_lease = self._next_lease, self._next_lease + 1
        generation = self.revoke(slot)
        return Lease(
            lease_id=lease_id,
            slot=slot,
            generation=generation,
            blocks=blocks,
            prompt_ids=list(prompt_ids),
            first_id=first_id,
        )

    def lend_unwritten(self, *, num_tokens: int) -> Lease:
        """Lend blocks that hold whatever the pool was filled with, from the first on."""
        num_blocks = self.layout.num_blocks_for(num_tokens)
        slot = NUM_SLOTS - 1
        return Lease(
            lease_id=1_000_000,
            slot=slot,
            generation=self.revoke(slot),
            blocks=list(range(1, num_blocks + 1)),
            prompt_ids=[2] * num_tokens,
            first_id=2,
        )

    def revoke(self, slot: int) -> int:
        """Publish another generation at a slot, and return it."""
        generation = self.page.read(slot) + 1
        self.page.publish(slot, generation)
        return generation

    def total_blocks(self, lease: Lease) -> int:
        """Return how many blocks the prompt and the next token take."""
        return self.layout.num_blocks_for(len(lease.prompt_ids) + 1)

    def chunk(
        self,
        lease: Lease,
        **changes: Any,  # noqa: ANN401 - fields of any type
    ) -> Chunk:
        """Return the CHUNK that announces all whole blocks of a prompt, with `changes`."""
        num_whole = len(lease.prompt_ids) // self.layout.block_size
        chunk = Chunk(
            epoch=self.epoch,
            lease=lease.lease_id,
            slot=lease.slot,
            generation=lease.generation,
            first=0,
            blocks=lease.blocks[:num_whole],
            total_blocks=self.total_blocks(lease),
        )
        return replace(chunk, **changes)

    def handoff(
        self,
        lease: Lease,
        *,
        max_tokens: int,
        request: dict[str, Any] | None = None,
        **changes: Any,  # noqa: ANN401 - fields of any type
    ) -> Handoff:
        """Return the HANDOFF of a prompt whose first token is known, with `changes`."""
        state = RequestState(
            id=f"lease-{lease.lease_id}",
            prompt_tokens=len(lease.prompt_ids),
            cached_tokens=0,
            ids=[lease.first_id],
            delivered=0,
            resumed=0,
            max_tokens=max_tokens,
            sampling=Sampling(seed=0),
            stop=[],
            stop_ids=[],
            stream=True,
            arrived_ns=1,
            started_ns=1,
            first_token_ns=1,
        )
        handoff = Handoff(
            epoch=self.epoch,
            lease=lease.lease_id,
            slot=lease.slot,
            generation=lease.generation,
            blocks=lease.blocks,
            num_tokens=len(lease.prompt_ids),
            total_blocks=self.total_blocks(lease),
            request=replace(state, **(request or {})),
            sent_ns=1,
        )
        return replace(handoff, **changes)

    def hand_over(self, handoff: Handoff) -> RawPeer:
        """Send a HANDOFF with a fresh connection, and return the client's end of that."""
        ours, theirs = socket.socketpair()
        with theirs:
            self.link.send(handoff, fds=[theirs.fileno()])
        return RawPeer(ours)


class FakeDecoded:
    """decoded as far as prefilld can tell.  It pulls nothing: it reads the proof and no more.

    Args:
        path: Where the real prefilld looks for decoded.
        host: What prefilld serves.
    """

    def __init__(self, path: Path, host: ModelHost) -> None:
        self._path, self.host = path, host
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(20)
        path.unlink(missing_ok=True)
        self._listener.bind(str(path))
        self._listener.listen(8)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; links live on."""
        self._listener.close()
        self._path.unlink(missing_ok=True)

    def accept(self) -> FakeDecodedLink:
        """Take prefilld's next connection."""
        sock, _ = self._listener.accept()
        return FakeDecodedLink(sock, self.host)

    def open(self, *, held: Sequence[int] = ()) -> FakeDecodedLink:
        """Take prefilld's next connection and bring the link up."""
        link = self.accept()
        link.open(held=held)
        return link


class FakeDecodedLink(RawPeer):
    """One link, seen from decoded's side.

    Args:
        sock: An accepted connection.
        host: What prefilld serves.
    """

    def __init__(self, sock: socket.socket, host: ModelHost) -> None:
        super().__init__(sock)
        self._host = host
        self.epoch = b""
        self.seen = 0
        """Reserving frames read, kept by `receive`."""
        self._reserved: set[int] = set()

    def receive(self) -> Message:
        """Return the next message; count it where it reserves room."""
        message = super().receive()
        is_first = isinstance(message, Chunk) and message.lease not in self._reserved
        if isinstance(message, Chunk):
            self._reserved.add(message.lease)
        if is_first or isinstance(message, Handoff):
            self.seen += 1
        return message

    @property
    def credits(self) -> Credits:
        """Room for everything, as of what was read so far."""
        return credits_after(self.seen)

    def welcome(self, *, held: Sequence[int] = (), **changes: Any) -> Welcome:  # noqa: ANN401
        """Read HELLO and return the WELCOME that answers it, with `changes`."""
        self.epoch = self.expect(Hello).epoch
        welcome = Welcome(
            instance=this_instance(),
            access="pull",
            held=list(held),
            pool_blocks=1 << 16,
            credits=self.credits,
        )
        return replace(welcome, **changes)

    def mapped(self, **changes: Any) -> Mapped:  # noqa: ANN401 - fields of any type
        """Read MAP and return the MAPPED that proves it, with `changes`."""
        described = self.expect(Map)
        pool_fd, page_fd = self.take_fds()
        head = os.pread(pool_fd, described.proof_bytes, 0)
        os.close(pool_fd)
        os.close(page_fd)
        mapped = Mapped(
            digest=hashlib.sha256(head).digest(), bandwidth_gb_s=1.0, credits=self.credits
        )
        return replace(mapped, **changes)

    def open(self, *, held: Sequence[int] = ()) -> None:
        """Bring the link up."""
        self.send(self.welcome(held=held))
        self.send(self.mapped())

    def answer(self, kind: type[Message], lease_id: int, **more: object) -> Message:
        """Return an ADOPT, RELEASE, REJECT or NOCHUNK of a lease with the present credits."""
        return kind(epoch=self.epoch, lease=lease_id, credits=self.credits, **more)

    def take_client(self) -> RawPeer:
        """Return the client's connection that the last HANDOFF brought."""
        (fd,) = self.take_fds()
        return RawPeer(socket.socket(fileno=fd))
