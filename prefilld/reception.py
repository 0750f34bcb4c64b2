"""Receives GENERATE and CHECK: has them judged, answers, and queues what passed."""

from __future__ import annotations

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from prefilld.admission import Admission, Bounds
from prefilld.casualties import poisoned_error
from prefilld.request import Prompt, Request
from prefilld.scheduler import QueueFullError
from protocol import messages as wire
from protocol.errors import RequestError
from shared.clock import NS_PER_S
from shared.kv.block_hashes import root_hash
from shared.model.answer import AnswerAssembler

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefilld.casualties import Casualties
    from prefilld.clients import Client
    from prefilld.metrics import PrefillMetrics
    from prefilld.serving import Serving
    from shared.daemon.model_host import ModelHost
    from shared.service.frame import Service

Q = TypeVar("Q", wire.Generate, wire.Check)
A = TypeVar("A")

BUSY_RETRY_MS = 1000
"""When a client that found the queue full should come back; a prompt takes about that long."""


class Reception:
    """The way in.

    Args:
        service: Configuration, clock and log.
        epoch: Of the pool.
        serving: Where accepted requests go.
        casualties: Tells what is not to be served again.
        bounds: Returns what a request must fit into now.
        turns_away: Returns whether requests are told `draining`.
    """

    def __init__(
        self,
        *,
        service: Service,
        epoch: bytes,
        host: ModelHost,
        serving: Serving,
        casualties: Casualties,
        metrics: PrefillMetrics,
        bounds: Callable[[], Bounds],
        turns_away: Callable[[], bool],
    ) -> None:
        self._service, self._host, self._serving = service, host, serving
        self._casualties, self._metrics = casualties, metrics
        self._bounds, self._turns_away = bounds, turns_away
        self._max_waiting = service.config.prefilld.max_waiting
        root = root_hash(fingerprint=host.fingerprint, epoch=epoch)
        self._admission = Admission(
            tokenizer=host.tokenizer,
            template=host.template,
            spec=host.spec,
            layout=host.layout,
            fingerprint=host.fingerprint,
            hash_root=root if service.config.pool.prefix_cache else None,
        )
        # One thread: a long prompt takes long to tokenise, and must not hold up the loop.
        self._judges = ThreadPoolExecutor(max_workers=1, thread_name_prefix="admission")
        self._num_on_thread = 0
        """Requests that the thread judges, or will."""
        self._quick_turn = asyncio.Lock()
        """Whose turn it is to be judged on the loop: one in each of its rounds, so that between two
        requests of a crowd it looks at its sockets, where a hand-over may wait."""
        self._judging_since_s: dict[Client, float] = {}
        """When each request came that is being judged, or waits to be, on the monotonic clock."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is being judged."""
        return not self._judging_since_s

    @property
    def judging_since_s(self) -> list[float]:
        """When each request came that is being judged, or waits to be, on the monotonic clock."""
        return list(self._judging_since_s.values())

    async def generate(self, client: Client, message: wire.Generate) -> None:
        """Judge a request and queue it; every failure is told to its client."""
        arrived_ns = self._service.clock.monotonic_ns()
        try:
            self._refuse_poisoned(message)
            prompt = await self._judge(client, self._admission.judge, message)
            if prompt is not None:
                self._accept(client, prompt, message.id or secrets.token_hex(8), arrived_ns)
        except RequestError as error:
            self._serving.fail(client, error, request_id=message.id)

    async def check(self, client: Client, message: wire.Check) -> None:
        """Judge a request without running it."""
        try:
            checked = await self._judge(client, self._admission.check, message)
            if checked is not None:
                client.finish(checked)
        except RequestError as error:
            self._serving.fail(client, error)

    def _refuse_poisoned(self, message: wire.Generate) -> None:
        if message.id is None:
            return
        if message.resume is None:
            self._casualties.begun(message.id)
        else:
            self._metrics.resumed.inc()
            self._service.log.info(
                "request.resumed",
                request_id=message.id,
                attempt=message.resume.attempt,
                num_deaths=self._casualties.came_back(message.id),
            )
        if self._casualties.is_poisoned(message.id):
            raise poisoned_error(message.id)

    def close(self) -> None:
        """End the thread; a judgement that has not begun is dropped."""
        self._judges.shutdown(wait=False, cancel_futures=True)

    async def _judge(self, client: Client, judge: Callable[[Q, Bounds], A], message: Q) -> A | None:
        """Judge a message; return None where its client has gone away meanwhile."""
        if self._turns_away():
            raise RequestError(
                "draining", "prefilld is shutting down; its successor will answer", retryable=True
            )
        num_judging = sum(each.is_open for each in self._judging_since_s)  # not who has left
        if num_judging + self._serving.num_waiting >= self._max_waiting:
            raise self._busy()
        self._judging_since_s[client] = self._service.clock.monotonic_ns() / NS_PER_S
        try:
            # A quick one waits behind those that take long, and so overtakes none of them.
            if self._num_on_thread or not self._admission.is_quick(message):
                judged = await self._judge_on_thread(judge, message)
                return judged if client.is_open else None
            await self._quick_turn.acquire()
            if not client.is_open:  # a crowd that left takes no rounds
                self._quick_turn.release()
                return None
            asyncio.get_running_loop().call_soon(self._quick_turn.release)
            return judge(message, self._bounds())
        finally:
            del self._judging_since_s[client]

    async def _judge_on_thread(self, judge: Callable[[Q, Bounds], A], message: Q) -> A:
        loop = asyncio.get_running_loop()
        self._num_on_thread += 1
        try:
            return await loop.run_in_executor(self._judges, judge, message, self._bounds())
        finally:
            self._num_on_thread -= 1

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
                min_tokens=prompt.min_tokens,
                stop_ids=frozenset(prompt.stop_ids),
                stop_strings=prompt.stop,
            ),
        )
        resumed = request.assembler.replay(prompt.resumed_ids, num_delivered=request.delivered)
        if resumed.finish is None:
            try:
                self._serving.enqueue(request)
            except QueueFullError:
                raise self._busy() from None
        self._metrics.accepted.inc()
        cached_tokens = 0 if resumed.finish is not None else self._serving.cached_tokens(prompt)
        self._service.log.info(
            "request.accepted",
            request_id=request.id,
            prompt_tokens=len(prompt.ids),
            cached_tokens=cached_tokens,
            resumed_tokens=len(prompt.resumed_ids),
            max_tokens=prompt.max_tokens,
        )
        if self._service.config.log.prompts:
            text = self._host.tokenizer.decode(request.token_ids, keep_control=True)
            self._service.log.info("request.prompt", request_id=request.id, text=text)
        client.send(self._accepted(request, cached_tokens))
        if resumed.finish is not None:  # what it resumes was a whole answer already
            self._serving.end(request, resumed.finish)
        elif client.is_cancelled:
            self._serving.cancel(client)

    def _accepted(self, request: Request, cached_tokens: int) -> wire.Accepted:
        seed = request.prompt.sampling.seed
        assert seed is not None, "admission resolves the seed"
        return wire.Accepted(
            id=request.id,
            seed=seed,
            prompt_tokens=len(request.prompt.ids),
            cached_tokens=cached_tokens,
            fingerprint=self._host.fingerprint,
        )

    def _busy(self) -> RequestError:
        return RequestError(
            "busy",
            f"the queue is full ({self._max_waiting} waiting); try again in "
            f"{BUSY_RETRY_MS / 1000:g} s",
            retryable=True,
            retry_after_ms=BUSY_RETRY_MS,
        )
