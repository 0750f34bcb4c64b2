"""prefilld's inner rooms over a tiny model: everything but the link and the listener."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefilld.admission import Bounds
from prefilld.casualties import Casualties
from prefilld.handoff import HandoffDesk
from prefilld.metrics import PrefillMetrics
from prefilld.overview import Overview
from prefilld.reception import Reception
from prefilld.serving import Serving
from protocol import messages as wire
from protocol.states import Role
from shared.engine.prefilling import EagerPrefiller
from shared.engine.runner import ModelRunner
from shared.engine.thread import EngineThread
from shared.kv.allocator import BlockAllocator
from shared.kv.control_page import ControlPage
from shared.kv.holds import BlockHolds
from shared.kv.leases import LeaseTable
from shared.kv.memfd import MemfdPool
from tests.unit.prefilld.recorders import EPOCH, Link, new_client
from tests.unit.protocol.recorder import Recorder

if TYPE_CHECKING:
    from prefilld.clients import Client
    from protocol.closing import CloseReason
    from shared.daemon.model_host import ModelHost
    from tests.unit.shared.daemon.kit import RecordingService


class User(Recorder):
    """The other end of a client's connection, with what it was told by kind."""

    @property
    def tokens(self) -> list[wire.Tokens]:
        return [message for message in self.messages if isinstance(message, wire.Tokens)]

    @property
    def kinds(self) -> list[type[wire.Message]]:
        return [type(message) for message in self.messages]

    async def error(self) -> wire.Error:
        message = await self.until_received(wire.Error)
        assert isinstance(message, wire.Error)
        return message

    async def end(self) -> wire.End:
        message = await self.until_received(wire.End)
        assert isinstance(message, wire.End)
        return message


class World:
    """Reception, queues, engine and desk; it routes clients' events as the daemon does."""

    def __init__(self, service: RecordingService, host: ModelHost, engine: EngineThread) -> None:
        self.service, self.host, self.engine = service, host, engine
        metrics = PrefillMetrics(service.metrics)
        layout = host.layout
        self.pool = MemfdPool.create(layout, fill=float("nan"))
        self.page = ControlPage.create(layout.num_blocks)
        self.allocator = BlockAllocator(layout.num_blocks)
        self.holds = BlockHolds(self.allocator, block_size=layout.block_size)
        self.desk = HandoffDesk(
            epoch=EPOCH,
            block_size=layout.block_size,
            leases=LeaseTable(layout.num_blocks),
            holds=self.holds,
            control_page=self.page,
            clock=service.clock,
            log=service.log,
            metrics=metrics,
        )
        self.casualties = Casualties()
        self.serving = Serving(
            service=service,
            prefiller=EagerPrefiller(ModelRunner(host.model, self.pool.kv, layout)),
            engine=engine,
            holds=self.holds,
            control_page=self.page,
            desk=self.desk,
            casualties=self.casualties,
            metrics=metrics,
        )
        self.desk.attach(self.serving)
        self.bounds = Bounds(prefill_blocks=15, decode_blocks=15, max_tokens_default=8)
        self.reception = Reception(
            service=service,
            epoch=EPOCH,
            host=host,
            serving=self.serving,
            casualties=self.casualties,
            metrics=metrics,
            bounds=lambda: self.bounds,
            turns_away=service.draining.is_set,
        )
        self.link = Link()
        self.overview = Overview(
            serving=self.serving,
            reception=self.reception,
            allocator=self.allocator,
            holds=self.holds,
            layout=layout,
            link_status=lambda: {"state": "open"},
            clock=service.clock,
        )

    def start(self) -> None:
        """Begin to compute."""
        self.service.spawn(self.serving.prefill.run(), name="prefill")

    def open_link(self, *, blocks: int = 100, sequences: int = 8) -> None:
        self.desk.link_opened(self.link, [])
        self.desk.update_credits(
            wire.Credits(free_blocks=blocks, free_sequences=sequences, queue_depth=0, seen=0)
        )
        self.desk.pump()

    def ask(
        self, message: wire.Generate | wire.Check, *, send_buffer_bytes: int | None = None
    ) -> User:
        """Connect and ask; return the user."""
        _, theirs = new_client(self, send_buffer_bytes=send_buffer_bytes)
        user = User(theirs, Role.CLIENT)
        user.start()
        user.socket.send(message)
        return user

    async def close(self) -> None:
        self.reception.close()
        await self.service.end()
        await self.engine.stop()
        self.page.close()

    # --- as the daemon's app ---

    def on_request(self, client: Client, message: wire.Message) -> None:
        assert isinstance(message, wire.Generate | wire.Check)
        work = (
            self.reception.generate(client, message)
            if isinstance(message, wire.Generate)
            else self.reception.check(client, message)
        )
        self.service.spawn(work, name="request")

    def on_cancel(self, client: Client) -> None:
        self.serving.cancel(client)

    def on_handed_over(self, _client: Client) -> None:
        pass

    def on_flushed(self, _client: Client) -> None:
        self.desk.pump()

    def on_gone(self, client: Client, _reason: CloseReason) -> None:
        self.serving.cancel(client)
