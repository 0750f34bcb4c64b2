"""One measurement of a running pair: look at it, warm it up, ask, and gather what came."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from protocol.client import Client
from shared.cli.answering import Interrupt, cancelled_by_interrupt
from shared.cli.bench_figures import figures_of
from shared.cli.bench_plan import Load, Slo, asks_of
from shared.cli.bench_processes import ClientProcesses, Run, num_processes_for
from shared.cli.bench_view import Told
from shared.cli.pair import decoded_socket
from shared.cli.progress import progress_bar
from shared.errors import DaemonBusyError, DaemonUnavailableError, ExitCode, KvpairError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from shared.cli.bench_stream import Heard, Listener
    from shared.cli.bench_view import StoppedBy

ANSWER_TIMEOUT_S = 5.0
"""A daemon answers STATUS and CHECK from its event loop, whatever its engine does."""

_WARMUP_ERRORS: dict[ExitCode, type[KvpairError]] = {
    ExitCode.BUSY: DaemonBusyError,
    ExitCode.NO_DAEMON: DaemonUnavailableError,
}

SEED_BITS = 48
"""Of the prompts' seed: no two runs meet, and request ids that tell it stay short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A pair that serves."""

    socket: Path
    """prefilld's."""
    vocab_size: int
    told: dict[str, object]
    """What the daemons tell of themselves."""


def look(socket: Path) -> Target:
    """Return what listens at a socket.

    Raises:
        UnixSocketError: A daemon cannot be reached.
        UsageError: It is not prefilld's.
        DaemonBusyError: They do not serve.
        KvpairError: prefilld is of a version that does not tell what this needs.
    """
    prefilld = Client(socket, timeout_s=ANSWER_TIMEOUT_S).status()
    if "decoded_socket" not in prefilld:  # which decoded does not tell
        raise UsageError(f"it is not prefilld that listens on {socket}; name prefilld's socket")
    if prefilld.get("state") != "serving":
        raise DaemonBusyError(
            f"prefilld does not serve, it is {prefilld.get('state')}",
            hint="`kvpair status` says more; `kvpair up -- kvpair bench` waits until both serve",
        )
    decoded = Client(decoded_socket(socket, prefilld), timeout_s=ANSWER_TIMEOUT_S).status()
    vocab_size = prefilld.get("vocab_size")
    if not isinstance(vocab_size, int):
        raise KvpairError(
            f"prefilld, version {prefilld.get('version')}, does not tell its vocabulary",
            hint="restart both daemons with the version of this command",
        )
    link = decoded.get("link")
    told = {name: prefilld.get(name) for name in ("model", "version", "fingerprint")}
    told |= {"prefilld_device": prefilld.get("device"), "decoded_device": decoded.get("device")}
    told |= {
        name: link.get(name) if isinstance(link, dict) else None
        for name in ("access", "access_because", "bandwidth_gb_s")
    }
    return Target(socket=socket, vocab_size=vocab_size, told=told)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What to measure, and how."""

    target: Target
    load: Load
    num_warmup: int
    slo: Slo
    time_limit_s: float

    def run(self) -> Told:
        """Warm the pair up, ask everything, return what came; Ctrl-C ends it early.

        Raises:
            KvpairError: The load does not fit the pair, the warm-up failed, or a client process
                died.
            UnixSocketError: prefilld is gone.
        """
        self._check_fit()
        num_processes = num_processes_for(self.load.max_at_once)
        prompt_seed = secrets.randbits(SEED_BITS)  # the prefix cache knows none of these prompts
        all_heard: list[Heard] = []
        interrupt = Interrupt()
        with ClientProcesses(
            self.target.socket, vocab_size=self.target.vocab_size, num_processes=num_processes
        ) as processes:
            deadline_s = time.monotonic() + self.time_limit_s
            self._warm_up(processes, prompt_seed, deadline_s)
            date = datetime.now(UTC).isoformat(timespec="seconds")
            with (
                progress_bar(self.load.num_requests) as advance,
                cancelled_by_interrupt(processes, interrupt),
            ):

                def take(heard: Heard) -> None:
                    all_heard.append(heard)
                    advance()

                run = _ask(processes, self.load, prompt_seed, deadline_s, take)
        return Told(
            date=date,
            pair=self.target.told,
            load=self.load,
            num_warmup=self.num_warmup,
            time_limit_s=self.time_limit_s,
            slo=self.slo,
            figures=figures_of(all_heard, self.slo),
            failures=[each.failure for each in all_heard if each.failure is not None],
            stopped_by=_stopped_by(run, interrupt),
            num_processes=num_processes,
            client_busy=run.busy,
        )

    def _check_fit(self) -> None:
        """Refuse a load whose longest request the pair would refuse.

        Raises:
            KvpairError: It is too large for the model or the pools.
        """
        longest, answer = self.load.prompt_tokens.high, self.load.answer_tokens.high
        client = Client(self.target.socket, timeout_s=ANSWER_TIMEOUT_S)
        if not client.check([1] * longest, max_tokens=answer).fits:
            raise KvpairError(
                f"a prompt of {longest:,} tokens with an answer of {answer:,} is too large for "
                "this pair's model or pools",
                hint="ask for fewer with --prompt-tokens and --answer-tokens",
            )

    def _warm_up(self, processes: ClientProcesses, prompt_seed: int, deadline_s: float) -> None:
        """Ask some requests that are not counted, as many at a time as will be.

        Raises:
            KvpairError: One was not answered; its class says what that one's failure would.
        """
        if not self.num_warmup:
            return
        load = replace(
            self.load,
            num_requests=self.num_warmup,
            rate=None,
            concurrency=self.load.max_at_once,
        )
        all_heard: list[Heard] = []
        first_number = self.load.num_requests  # behind all that are measured
        run = _ask(
            processes, load, prompt_seed, deadline_s, all_heard.append, first_number=first_number
        )
        for heard in all_heard:
            if heard.failure is not None:
                kind = _WARMUP_ERRORS.get(heard.failure.exit_code, KvpairError)
                raise kind(f"nothing was measured, the warm-up failed: {heard.failure}")
        if run.is_out_of_time:
            raise KvpairError(
                f"nothing was measured, the warm-up took more than {self.time_limit_s:g} s",
                hint="raise --time-limit, or ask for less with --warmup",
            )


def _stopped_by(run: Run, interrupt: Interrupt) -> StoppedBy | None:
    if interrupt.was_seen:
        return "interrupt"
    return "time-limit" if run.is_out_of_time else None


def _ask(
    processes: ClientProcesses,
    load: Load,
    prompt_seed: int,
    deadline_s: float,
    take: Listener,
    *,
    first_number: int = 0,
) -> Run:
    """Have a load asked until it is done or the time is over."""
    return processes.run(
        asks_of(load, prompt_seed=prompt_seed, first_number=first_number),
        concurrency=load.max_at_once,
        is_open=load.rate is not None,
        time_limit_s=deadline_s - time.monotonic(),
        on_heard=take,
    )
