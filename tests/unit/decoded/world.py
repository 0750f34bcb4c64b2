"""decoded's inner rooms over a tiny model, and a prefilld that hands requests over to them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from decoded.access import Access
from decoded.adoption import AdoptionDesk
from decoded.decode_loop import DecodeLoop
from decoded.link import LinkSession
from decoded.link_pool import LinkPool
from decoded.metrics import DecodeMetrics
from decoded.overlapped_turns import ArenaPath, OverlappedTurns
from decoded.scheduler import Scheduler
from decoded.sequences import SequenceBook
from decoded.swap_desk import SwapDesk
from decoded.turns import EagerTurns, Turns
from decoded.visitor import Visitor
from protocol import messages as wire
from protocol.limits import VERSION
from protocol.states import Role
from shared.daemon.devices import CPU_DEVICE
from shared.daemon.instance import this_instance
from shared.daemon.model_host import ModelHost
from shared.daemon.sampling import sampling_params
from shared.engine.batch import SequenceStep
from shared.engine.block_puller import EagerPuller
from shared.engine.decoding import EagerDecoder
from shared.engine.graph_decoder import GraphDecoder
from shared.engine.run_copies import RunCopies
from shared.engine.runner import ModelRunner
from shared.engine.thread import EngineThread
from shared.kv.allocator import BlockAllocator
from shared.kv.control_page import ControlPage
from shared.kv.memfd import MemfdPool
from shared.kv.pool import LocalPool
from shared.kv.proof import write_pattern
from shared.ops.pool_pair import PoolPair
from tests.unit.decoded.samples import EPOCH, STATE, changed, streaming_user
from tests.unit.protocol.recorder import Recorder
from tests.unit.shared.daemon.kit import socketpair, until

if TYPE_CHECKING:
    from decoded.sequence import Sequence
    from tests.unit.shared.daemon.kit import RecordingService

NUM_SLOTS = 8
NUM_BLOCKS = 16

MakeTurns = Callable[[ModelHost, LocalPool, LocalPool], Turns]


class Prefilld(Recorder):
    """The other end of a link: a pool with prompts in it, and what decoded said."""

    def __init__(self, sock: Any, host: ModelHost) -> None:  # noqa: ANN401 - a socket
        super().__init__(sock, Role.PREFILLD_LINK)
        self.pool = MemfdPool.create(host.layout)
        self.page = ControlPage.create(NUM_SLOTS)
        self._runner = ModelRunner(host.model, self.pool.kv, host.layout)
        self._host = host

    def hello(self, **changes: Any) -> None:  # noqa: ANN401 - HELLO's fields
        instance = this_instance()
        hello = wire.Hello(
            version=VERSION,
            instance=changed(instance, pid=instance.pid + 1),  # as another process would say
            epoch=EPOCH,
            backend="memfd",
            device="cpu",
            fingerprint=self._host.fingerprint,
            fields=self._host.fields,
        )
        self.socket.send(changed(hello, **changes))

    def map(self, **changes: Any) -> bytes:  # noqa: ANN401 - MAP's fields
        """Send MAP; return the digest that proves the mapping."""
        digest = write_pattern(self.pool, os.urandom(64))
        layout = self.pool.layout
        message = wire.Map(
            pool_bytes=layout.pool_bytes,
            offset=0,
            num_blocks=layout.num_blocks,
            control_slots=NUM_SLOTS,
            proof_bytes=64,
        )
        fds = (self.pool.export(), self.page.export())
        self.socket.send(changed(message, **changes), fds)
        for fd in fds:
            os.close(fd)
        return digest

    def compute(self, ids: list[int], blocks: list[int]) -> int:
        """Fill blocks with a prompt; return the first token of its answer."""
        step = SequenceStep(
            token_ids=ids,
            start_position=0,
            block_table=blocks,
            sampling=sampling_params(STATE.sampling),
        )
        (token_id,) = self._runner.execute([step]).token_ids
        assert token_id is not None
        return token_id

    def hand_over(
        self,
        ids: list[int],
        blocks: list[int],
        /,
        *,
        lease: int = 1,
        at: int = 0,
        **changes: Any,  # noqa: ANN401 - HANDOFF's fields
    ) -> Recorder:
        """Compute a prompt and hand it over; return its user."""
        first_id = self.compute(ids, blocks)
        if self.page.read(at) % 2 == 0:
            self.page.publish(at, self.page.read(at) + 1)
        handoff = wire.Handoff(
            epoch=EPOCH,
            lease=lease,
            slot=at,
            generation=self.page.read(at),
            blocks=blocks,
            num_tokens=len(ids),
            total_blocks=2,
            request=changed(
                STATE, id=f"r{lease}", prompt_tokens=len(ids), ids=[first_id], stop_ids=[]
            ),
            sent_ns=4,
        )
        ours, theirs = socketpair()
        user = streaming_user(theirs)
        self.socket.send(changed(handoff, **changes), (ours.fileno(),))
        ours.close()
        return user

    def of(self, kind: type[wire.Message]) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]

    @property
    def kinds(self) -> list[type[wire.Message]]:
        return [type(message) for message in self.messages]


def eager_turns(host: ModelHost, pool: LocalPool, arena: LocalPool) -> Turns:
    """Return the turns of a daemon on the CPU."""
    decoder = EagerDecoder(ModelRunner(host.model, pool.kv, host.layout))
    return EagerTurns(decoder, pool.kv, arena.kv)


def overlapped_turns(host: ModelHost, pool: LocalPool, arena: LocalPool) -> Turns:
    """Return the turns of a daemon on a GPU: what differs here is that nothing takes time."""
    decoder = GraphDecoder(
        host.model,
        PoolPair.of(pool.kv),
        host.layout,
        max_batch=4,
        max_context_len=NUM_BLOCKS * host.layout.block_size,
    )
    path = ArenaPath(
        pool=pool.kv,
        arena=arena.kv,
        out=RunCopies(arena.kv, pool.kv.device),
        back=RunCopies(pool.kv, pool.kv.device),
    )
    return OverlappedTurns(decoder, EagerPuller(pool.kv), event_timeout_s=5, arena_path=path)


class World:
    """Desk, book, scheduler, loop; it greets links as the daemon does."""

    def __init__(
        self,
        service: RecordingService,
        host: ModelHost,
        make_turns: MakeTurns = eager_turns,
    ) -> None:
        self.service, self.host = service, host
        self.engine = EngineThread(num_threads=1)
        self.metrics = DecodeMetrics(service.metrics)
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.arena = BlockAllocator(NUM_BLOCKS) if service.config.decoded.swap_gib else None
        self.scheduler: Scheduler[Sequence] = Scheduler(
            allocator=self.allocator,
            max_batch=service.config.decoded.max_batch,
            arena=self.arena,
        )
        self.book = SequenceBook(
            service=service,
            scheduler=self.scheduler,
            metrics=self.metrics,
            decode=host.tokenizer.decode,
            on_work=self.wake,
        )
        self.desk = AdoptionDesk(
            service=service,
            scheduler=self.scheduler,
            book=self.book,
            metrics=self.metrics,
            token_bytes=host.tokenizer.token_bytes,
            block_size=host.layout.block_size,
            on_work=self.wake,
        )
        self.swaps = SwapDesk(
            service=service,
            scheduler=self.scheduler,
            book=self.book,
            metrics=self.metrics,
            block_bytes=host.layout.block_bytes,
        )
        self.pool = LocalPool(host.layout, fill=float("nan"))
        self.arena_pool = LocalPool(host.layout, fill=float("nan"))
        self.turns = make_turns(host, self.pool, self.arena_pool)
        self.access = Access("pull", "the test says so")
        self.loop = DecodeLoop(
            turns=self.turns,
            engine=self.engine,
            layout=host.layout,
            scheduler=self.scheduler,
            desk=self.desk,
            swaps=self.swaps,
            book=self.book,
            metrics=self.metrics,
        )
        self.sessions: list[LinkSession] = []
        self.prefillds: list[Prefilld] = []

    def wake(self) -> None:
        self.loop.wake()

    def start(self) -> None:
        """Begin to take turns."""
        self.service.spawn(self.loop.run(), name="decode")

    def knock(self, send_buffer_bytes: int | None = None) -> Prefilld:
        """Connect a prefilld that has said nothing yet."""
        ours, theirs = socketpair(send_buffer_bytes)
        Visitor(ours, loop=asyncio.get_running_loop(), handler=self, now_s=0)
        prefilld = Prefilld(theirs, self.host)
        prefilld.start()
        self.prefillds.append(prefilld)
        return prefilld

    async def linked(self, send_buffer_bytes: int | None = None) -> tuple[Prefilld, LinkSession]:
        """Return both ends of an open link."""
        prefilld = self.knock(send_buffer_bytes)
        prefilld.hello()
        await prefilld.until_received(wire.Welcome)
        digest = prefilld.map()
        mapped = await prefilld.until_received(wire.Mapped)
        assert isinstance(mapped, wire.Mapped)
        assert mapped.digest == digest
        return prefilld, self.sessions[-1]

    @property
    def is_all_free(self) -> bool:
        return self.allocator.counts().free == NUM_BLOCKS - 1

    def tick(self) -> None:
        """Look after the links once, as the daemon does now and then."""
        self.desk.tick()

    async def settled(self) -> None:
        """Wait until nothing is left, and check the books."""
        await until(lambda: self.is_all_free and self.book.is_idle)
        self.allocator.check_integrity()
        if self.arena is not None:
            self.arena.check_integrity()
            assert self.arena.num_free == NUM_BLOCKS - 1
        assert not self.scheduler.swapped
        assert self.scheduler.num_reserved == self.scheduler.num_running == 0

    async def close(self) -> None:
        await self.service.end()
        await self.engine.stop()
        for sequence in self.book.living:
            sequence.stream.close()
        for session in self.sessions:
            session.leave()
            if session.is_mapped:
                session.peer_pool.close()
        for prefilld in self.prefillds:
            prefilld.socket.close()
            prefilld.page.close()

    # --- as the daemon's app ---

    def on_status(self, _visitor: Visitor) -> None:
        raise NotImplementedError

    def on_metrics(self, _visitor: Visitor) -> None:
        raise NotImplementedError

    def on_gone(self, _visitor: Visitor, _code: str | None) -> None:
        pass

    def on_hello(self, visitor: Visitor, hello: wire.Hello) -> None:
        session = LinkSession(
            service=self.service,
            host=self.host,
            pool=LinkPool(
                service=self.service,
                engine=self.engine,
                host=self.host,
                device=CPU_DEVICE,
                hello=hello,
                access=self.access,
                set_peer=self.turns.set_peer,
            ),
            socket=visitor.socket,
            hello=hello,
            pid=visitor.credentials.pid,
            intake=self.desk.new_intake(is_direct=self.access.way == "direct"),
            handler=self.desk,
            loop=asyncio.get_running_loop(),
        )
        self.desk.links.add(session)
        self.sessions.append(session)
        visitor.become(session)
        session.welcome(this_instance(), held=[], pool_blocks=NUM_BLOCKS - 1)


def ids_of(num_tokens: int) -> list[int]:
    return [2 + (7 * index) % 250 for index in range(num_tokens)]


def answer_of(user: Recorder) -> list[int]:
    """Return the token ids that a user was sent."""
    return [
        token_id
        for message in user.messages
        if isinstance(message, wire.Tokens)
        for token_id in message.ids
    ]
