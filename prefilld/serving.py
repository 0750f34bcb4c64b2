"""Serves requests from GENERATE to the hand-over: judges, queues, prefills, answers the first token.

Everything here runs on the event loop; the engine thread only executes the steps that this decides,
and admission has a thread of its own.  So a request's state has one owner and needs no lock.
Blocks that a running step writes are never freed under it: whatever ends a request while the engine
has its chunk takes effect when that step is done.
"""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from prefilld.admission import Admission, Bounds
from prefilld.answers import end_of, piece_message
from prefilld.prefill import run_chunks
from prefilld.request import Prompt, Request, RequestState
from prefilld.scheduler import Chunk, QueueFullError, Scheduler
from protocol import messages as wire
from protocol.errors import RequestError
from shared.clock import NS_PER_S
from shared.model.answer import AnswerAssembler

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.clients import Client
    from prefilld.handoff import HandoffDesk
    from prefilld.metrics import PrefillMetrics
    from shared.daemon.model_host import ModelHost
    from shared.engine.runner import ModelRunner
    from shared.engine.thread import EngineThread
    from shared.kv.allocator import BlockAllocator
    from shared.service.frame import Service

Q = TypeVar("Q")
A = TypeVar("A")

BUSY_RETRY_MS = 1000
"""When a client that found the queue full should come back; a prompt takes about that long."""


class Serving:
    """All requests that are prefilld's.

    Args:
        service: Configuration, clock, log, and whether the daemon drains.
        bounds: Returns what a request must fit into now.
    """

    def __init__(
        self,
        *,
        service: Service,
        host: ModelHost,
        runner: ModelRunner,
        engine: EngineThread,
        allocator: BlockAllocator,
        desk: HandoffDesk,
        metrics: PrefillMetrics,
        bounds: Callable[[], Bounds],
    ) -> None:
        config = service.config
        self._service, self._host, self._runner, self._engine = service, host, runner, engine
        self._allocator, self._desk, self._metrics = allocator, desk, metrics
        self._bounds = bounds
        self._scheduler: Scheduler[Request] = Scheduler(
            token_budget=config.prefilld.token_budget,
            max_waiting=config.prefilld.max_waiting,
            max_running=config.prefilld.max_running,
        )
        self._admission = Admission(
            tokenizer=host.tokenizer,
            template=host.template,
            spec=host.spec,
            layout=host.layout,
            fingerprint=host.fingerprint,
        )
        self._judges = ThreadPoolExecutor(max_workers=1, thread_name_prefix="admission")
        self._num_judging = 0
        self._requests: dict[Client, Request] = {}
        """Requests that are prefilld's, by their connection."""
        self._cancelled: dict[Request, RequestError | None] = {}
        """Requests to end before the next step: with an ERROR, or with END `cancelled`."""
        self._work = asyncio.Event()

    # --- what others may know ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is prefilld's and nothing is left to settle with decoded."""
        return not self._requests and self._num_judging == 0 and self._desk.num_sent == 0

    def queue_status(self) -> dict[str, object]:
        """Return what STATUS tells of the queues."""
        waiting = self._scheduler.waiting
        oldest_ns = waiting[0].arrived_ns if waiting else self._now_ns()
        return {
            "waiting": len(waiting),
            "oldest_s": round((self._now_ns() - oldest_ns) / NS_PER_S, 3),
            "running": self._scheduler.num_running,
            "ready": self._desk.num_ready,
            "sent": self._desk.num_sent,
        }

    # --- a request arrives -------------------------------------------------------------------

    async def generate(self, client: Client, message: wire.Generate) -> None:
        """Judge a request and queue it; every failure is told to its client."""
        arrived_ns = self._now_ns()
        try:
            prompt = await self._judge(self._admission.judge, message)
            if client.is_open:  # else it went away meanwhile
                self._accept(client, prompt, message.id or secrets.token_hex(8), arrived_ns)
        except RequestError as error:
            self.refuse(client, error)

    async def check(self, client: Client, message: wire.Check) -> None:
        """Judge a request without running it."""
        try:
            client.finish(await self._judge(self._admission.check, message))
        except RequestError as error:
            self.refuse(client, error)

    def refuse(self, client: Client, error: RequestError) -> None:
        """Tell a client that its request failed."""
        self._metrics.failed.labels(error.code).inc()
        self._service.log.info("request.refused", code=error.code, reason=error.message)
        client.finish(
            wire.Error(
                code=error.code,
                message=error.message,
                retryable=error.retryable,
                retry_after_ms=error.retry_after_ms,
            )
        )

    async def _judge(self, judge: Callable[[Q, Bounds], A], message: Q) -> A:
        if self._service.draining.is_set():
            raise RequestError("draining", "prefilld is shutting down", retryable=True)
        if self._num_judging + self._scheduler.num_waiting >= self._max_waiting:
            raise self._busy()
        self._num_judging += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._judges, judge, message, self._bounds())
        finally:
            self._num_judging -= 1

    def _accept(self, client: Client, prompt: Prompt, request_id: str, arrived_ns: int) -> None:
        request = Request(
            id=request_id,
            client=client,
            prompt=prompt,
            token_ids=[*prompt.ids, *prompt.resumed_ids],
            arrived_ns=arrived_ns,
            deadline_s=arrived_ns / NS_PER_S + self._service.config.limits.request_timeout_s,
            answer_ids=list(prompt.resumed_ids),
            delivered=len(prompt.resumed_ids),
            assembler=AnswerAssembler(
                self._host.tokenizer.token_bytes,
                max_tokens=prompt.max_tokens,
                stop_ids=frozenset(prompt.stop_ids),
                stop_strings=prompt.stop,
            ),
        )
        piece = request.assembler.replay(prompt.resumed_ids, num_delivered=request.delivered)
        if piece.finish is None:
            try:
                self._scheduler.add(request)
            except QueueFullError:
                raise self._busy() from None
        self._requests[client] = request
        self._metrics.accepted.inc()
        self._service.log.info(
            "request.accepted",
            request_id=request.id,
            prompt_tokens=len(prompt.ids),
            resumed_tokens=len(prompt.resumed_ids),
            max_tokens=prompt.max_tokens,
        )
        assert prompt.sampling.seed is not None
        client.send(
            wire.Accepted(
                id=request.id,
                seed=prompt.sampling.seed,
                prompt_tokens=len(prompt.ids),
                cached_tokens=0,
                fingerprint=self._host.fingerprint,
            )
        )
        if piece.finish is not None:  # what it resumes was a whole answer already
            self._end(request, piece.finish)
        elif client.is_cancelled:
            self.cancel(client)
        self._work.set()

    def _busy(self) -> RequestError:
        return RequestError(
            "busy",
            f"{self._max_waiting} requests are waiting already",
            retryable=True,
            retry_after_ms=BUSY_RETRY_MS,
        )

    @property
    def _max_waiting(self) -> int:
        return self._service.config.prefilld.max_waiting

    # --- prefill -----------------------------------------------------------------------------

    async def prefill_loop(self) -> None:
        """Compute what there is to compute, for ever."""
        while True:
            self._end_cancelled()
            self._admit()
            chunks = self._scheduler.next_step()
            if not chunks:
                self._work.clear()
                await self._work.wait()
                continue
            for chunk in chunks:
                chunk.request.started_ns = chunk.request.started_ns or self._now_ns()
            token_ids = await self._engine.run(run_chunks, self._runner, chunks)
            for chunk, token_id in zip(chunks, token_ids, strict=True):
                self._computed(chunk, token_id)
            self._desk.pump()

    def wake(self) -> None:
        """Look again: blocks came free, or a request is to end."""
        self._work.set()

    def _admit(self) -> None:
        while (request := self._scheduler.admit(self._allocator.num_free)) is not None:
            request.blocks = self._allocator.allocate(request.num_blocks)
            request.state = RequestState.RUNNING

    def _computed(self, chunk: Chunk[Request], token_id: int | None) -> None:
        request = chunk.request
        request.computed_tokens += chunk.length
        self._metrics.prompt_tokens.inc(chunk.length)
        if request in self._cancelled:
            return  # `_end_cancelled` is next
        if token_id is None:
            self._desk.announce(request)
            return
        self._scheduler.remove(request)
        self._first_token(request, token_id)

    def _first_token(self, request: Request, token_id: int) -> None:
        request.first_token_ns = self._now_ns()
        request.answer_ids.append(token_id)
        self._metrics.queue_seconds.observe((request.started_ns - request.arrived_ns) / NS_PER_S)
        self._metrics.prefill_seconds.observe(
            (request.first_token_ns - request.started_ns) / NS_PER_S
        )
        piece = request.assembler.push(token_id)
        has_text = bool(piece.ids or piece.text)
        if has_text and (request.prompt.stream or piece.finish is not None):
            request.client.send(piece_message(piece))
            request.delivered = piece.index + len(piece.ids)
        if piece.finish is not None:
            self._end(request, piece.finish)
            return
        request.deadline_s = self._now_s() + self._service.config.limits.request_timeout_s
        self._desk.ready(request)

    # --- ends --------------------------------------------------------------------------------

    def cancel(self, client: Client, error: RequestError | None = None) -> None:
        """End a client's request: its will, or an ERROR of ours; unknown clients are ignored."""
        request = self._requests.get(client)
        if request is None:
            return
        if request.state is RequestState.RUNNING:
            self._cancelled.setdefault(request, error)
            self._work.set()
        elif request.state in (RequestState.WAITING, RequestState.READY):
            self._give_up(request, error)

    def adopted(self, request: Request) -> None:
        """Forget a request that is decoded's now."""
        self._requests.pop(request.client, None)

    def rejected(self, request: Request, code: str, message: str) -> None:
        """Put a request back that decoded did not take, unless its client has to know."""
        self._desk.ready(request)
        if code in ("fd-lost", "no-room", "draining"):
            return  # nothing is wrong with the request: it waits for its next turn
        self.cancel(request.client, RequestError("internal", f"decoded refused it: {message}"))

    def expire(self, now_s: float) -> None:
        """End what has waited for too long."""
        timeout_s = self._service.config.limits.request_timeout_s
        for request in list(self._requests.values()):
            if request.deadline_s <= now_s and request.state is not RequestState.SENT:
                where = request.state.name.lower()
                error = RequestError(
                    "timeout", f"the request was {where} for {timeout_s:g} s", retryable=True
                )
                self.cancel(request.client, error)

    def end_all(self, error: RequestError) -> None:
        """End every request that is still prefilld's.

        For the daemon's end: a step may still be running, so nothing may be allocated after this.
        """
        for client in list(self._requests):
            self.cancel(client, error)
        self._end_cancelled()

    def close(self) -> None:
        """End the admission thread; a judgement that runs is dropped."""
        self._judges.shutdown(wait=False, cancel_futures=True)

    def _end_cancelled(self) -> None:
        """End the cancelled requests; only while the engine has none of their chunks."""
        while self._cancelled:
            request, error = self._cancelled.popitem()
            self._give_up(request, error)

    def _give_up(self, request: Request, error: RequestError | None) -> None:
        if error is None:
            self._end(request, "cancelled")
        else:
            self._forget(request)
            self.refuse(request.client, error)

    def _end(self, request: Request, reason: str) -> None:
        """Send END and take everything back."""
        is_gone = not request.client.is_open
        self._metrics.ended.labels("gone" if is_gone else reason).inc()
        self._service.log.info(
            "request.ended",
            request_id=request.id,
            reason="gone" if is_gone else reason,
            completion_tokens=len(request.answer_ids),
        )
        self._forget(request)
        request.client.finish(end_of(request, reason, self._now_ns()))

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.client, None)
        self._scheduler.remove(request)
        if request.state is not RequestState.ENDED:
            self._desk.withdraw(request)
        self._work.set()

    def _now_ns(self) -> int:
        return self._service.clock.monotonic_ns()

    def _now_s(self) -> float:
        return self._now_ns() / NS_PER_S
