"""The book of accepted requests: queued, answered with the first token, handed over, ended.

Everything here runs on the event loop, so a request's state has one owner and needs no lock.
Blocks that a running step writes are never freed under it: whatever ends a request while the engine
has its chunk takes effect after that step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefilld.answers import end_of, piece_message
from prefilld.casualties import poisoned_error
from prefilld.prefill_loop import PrefillLoop
from prefilld.request import Request, RequestState
from prefilld.scheduler import Scheduler
from prefilld.spans import trace_of
from protocol import messages as wire
from protocol.errors import RequestError
from shared.clock import NS_PER_S
from shared.daemon.sampling import wire_logprob

if TYPE_CHECKING:
    from prefilld.casualties import Casualties
    from prefilld.clients import Client
    from prefilld.handoff import HandoffDesk
    from prefilld.metrics import PrefillMetrics
    from prefilld.request import Prompt
    from shared.engine.prefilling import Prefiller
    from shared.engine.thread import EngineThread
    from shared.kv.control_page import ControlPage
    from shared.kv.holds import BlockHolds
    from shared.service.frame import Service

_TOO_LONG = {
    RequestState.WAITING: "the prompt got no room in the pool",
    RequestState.RUNNING: "the prompt was not computed",
    RequestState.READY: "decoded did not take the request",
}
"""What did not come in time, by the state that a request waits in."""

REQUEUED_CODES = frozenset({"fd-lost", "no-room", "draining"})
"""REJECTs in which nothing is wrong with the request itself: it waits for its next turn."""

OUR_FAULTS = frozenset({"internal", "poisoned", "timeout"})
"""Codes that an operator should see; other requests fail by their clients' doing, or come again."""


class Serving:
    """All requests that are prefilld's.

    Args:
        service: Configuration, clock and log.
        prefiller: What computes, over prefilld's pool.
        engine: The thread it runs on.
        holds: Who has which blocks of that pool.
        control_page: Where first tokens are told.
        desk: Where a prompt goes once its first token is known.
        casualties: Told what decoded adopted; tells what is not to be handed to another one.
    """

    def __init__(
        self,
        *,
        service: Service,
        prefiller: Prefiller,
        engine: EngineThread,
        holds: BlockHolds,
        control_page: ControlPage,
        desk: HandoffDesk,
        casualties: Casualties,
        metrics: PrefillMetrics,
    ) -> None:
        config = service.config.prefilld
        self._service, self._holds, self._desk = service, holds, desk
        self._casualties, self._metrics = casualties, metrics
        self._scheduler: Scheduler[Request] = Scheduler(
            token_budget=config.token_budget,
            lone_budget=config.lone_budget,
            max_waiting=config.max_waiting,
            max_running=config.max_running,
        )
        self._requests: dict[Client, Request] = {}
        """Requests that are prefilld's, by their connection."""
        self._cancelled: dict[Request, RequestError | None] = {}
        """Requests to end before the next step: with an ERROR, or with END `cancelled`."""
        self.prefill = PrefillLoop(
            prefiller=prefiller,
            engine=engine,
            scheduler=self._scheduler,
            holds=holds,
            control_page=control_page,
            desk=desk,
            owner=self,
            metrics=metrics,
            clock=service.clock,
            log=service.log,
        )

    # --- what others may know ----------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no request is prefilld's and nothing is left to settle with decoded."""
        return not self._requests and self._desk.lending.num_sent == 0

    @property
    def num_requests(self) -> int:
        """Requests that are prefilld's."""
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return self._scheduler.num_waiting

    @property
    def requests(self) -> tuple[Request, ...]:
        """Requests that are prefilld's, in the order of their arrival."""
        return tuple(self._requests.values())

    def cached_tokens(self, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the prefix cache has now; it may change meanwhile."""
        num_tokens = len(prompt.ids) + len(prompt.resumed_ids)
        return min(self._holds.cached_tokens(num_tokens, prompt.block_hashes), len(prompt.ids))

    # --- a request arrives -------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Queue an accepted request behind all others.

        Raises:
            QueueFullError: As many wait as may wait; nothing was queued.
        """
        self._scheduler.add(request)
        self._requests[request.client] = request
        self.prefill.wake()

    def fail(self, client: Client, error: RequestError, *, request_id: str | None = None) -> None:
        """Tell a client that its request failed; it has no id before it was accepted."""
        self._metrics.failed.labels(error.code).inc()
        known = {} if request_id is None else {"request_id": request_id}
        log = self._service.log.warning if error.code in OUR_FAULTS else self._service.log.info
        log("request.failed", code=error.code, reason=error.message, **known)
        client.finish(
            wire.Error(
                code=error.code,
                message=error.message,
                retryable=error.retryable,
                retry_after_ms=error.retry_after_ms,
            )
        )

    # --- prefill -----------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again: blocks came free."""
        self.prefill.wake()

    def is_cancelled(self, request: Request) -> bool:
        """Whether a request is to end before the next step."""
        return request in self._cancelled

    def end_cancelled(self) -> None:
        """End the cancelled requests of which the engine has no chunk; others get none any more."""
        for request in tuple(self._cancelled):
            if request.num_in_flight:
                self._scheduler.remove(request)
            else:
                self._give_up(request, self._cancelled.pop(request))

    def first_token(self, request: Request, token_id: int) -> None:
        """Answer with the first token, and hand the rest over unless that ends it."""
        request.first_token_ns = self._now_ns()
        request.answer_ids.append(token_id)
        if request.history is not None:
            request.held_logprobs += map(wire_logprob, request.history.logprobs)
        piece = request.assembler.push(token_id)
        has_text = bool(piece.ids or piece.text)
        if has_text and (request.prompt.stream or piece.finish is not None):
            asked = request.prompt.logprobs is not None
            request.client.send(piece_message(piece, request.held_logprobs if asked else None))
            request.held_logprobs = []
            request.delivered = piece.index + len(piece.ids)
        self._metrics.first_token(request)
        if piece.finish is not None:
            self.end(request, piece.finish)
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
            self.prefill.wake()
        elif request.state in (RequestState.WAITING, RequestState.READY):
            self._give_up(request, error)

    def adopted(self, request: Request) -> None:
        """Forget a request that is decoded's now."""
        self._requests.pop(request.client, None)
        self._casualties.adopted(request.id)

    def rejected(self, request: Request, code: str, message: str) -> None:
        """Put a request back that decoded did not take, unless its client has to know."""
        self._desk.ready(request)
        if code not in REQUEUED_CODES:
            told = code if code == "too-large" else "internal"  # a smaller decoded was started
            self.cancel(request.client, RequestError(told, f"decoded refused it: {message}"))

    def expire(self, now_s: float) -> None:
        """End what has waited for too long."""
        timeout_s = self._service.config.limits.request_timeout_s
        for request in list(self._requests.values()):
            if request.deadline_s <= now_s and request.state is not RequestState.SENT:
                error = RequestError(
                    "timeout",
                    f"{_TOO_LONG[request.state]} within {timeout_s:g} s "
                    "(limits.request_timeout_s); `kvpair top` shows what it waited for",
                    retryable=True,
                )
                self.cancel(request.client, error)

    def end_poisoned(self) -> None:
        """End what decoded died under too often; after the loss of a link, before the next one."""
        for client, request in list(self._requests.items()):
            if self._casualties.is_poisoned(request.id):
                self.cancel(client, poisoned_error(request.id))

    def end_all(self, error: RequestError) -> None:
        """End every request that is still prefilld's.

        For the daemon's end: a step may still be running, so nothing may be allocated after this.
        """
        for client in list(self._requests):
            self.cancel(client, error)
        while self._cancelled:
            self._give_up(*self._cancelled.popitem())

    def _give_up(self, request: Request, error: RequestError | None) -> None:
        if error is None:
            self.end(request, "cancelled")
        else:
            self._forget(request)
            self.fail(request.client, error, request_id=request.id)
            self._service.tracer.record(trace_of(request, self._now_ns(), error_code=error.code))

    def end(self, request: Request, reason: str) -> None:
        """Send END and take everything back; also where the request was never queued."""
        is_gone = not request.client.is_open
        self._metrics.ended.labels("gone" if is_gone else reason).inc()
        self._service.log.info(
            "request.ended",
            request_id=request.id,
            reason="gone" if is_gone else reason,
            completion_tokens=len(request.answer_ids),
        )
        self._forget(request)
        now_ns = self._now_ns()
        request.client.finish(end_of(request, reason, now_ns))
        self._service.tracer.record(trace_of(request, now_ns, reason=reason))

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.client, None)
        self._scheduler.remove(request)
        if request.state is not RequestState.ENDED:
            self._desk.withdraw(request)
        self.prefill.wake()

    def _now_ns(self) -> int:
        return self._service.clock.monotonic_ns()

    def _now_s(self) -> float:
        return self._now_ns() / NS_PER_S
