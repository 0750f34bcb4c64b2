"""`kvpair bench`: how fast the running pair is, and whether one prompt stalls another's stream.

Figures on stdout, progress and doubts on stderr.  Clients run in processes of their own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from protocol.limits import MAX_SEED, MAX_TOKENS
from shared.cli.bench_plan import MAX_CONCURRENCY, Load, Slo, Span
from shared.cli.parameters import Number, TokenSpan, socket_option
from shared.cli.words import PIPE_COLUMNS
from shared.config.paths import client_socket
from shared.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from shared.cli.bench_view import Told

DEFAULT_REQUESTS, DEFAULT_CONCURRENCY, DEFAULT_WARMUP = 24, 4, 4
DEFAULT_PROMPT_TOKENS, DEFAULT_ANSWER_TOKENS = "128", "32"
"""Some seconds with the embedded model on two cores."""

DEFAULT_TIME_LIMIT_S = 300.0

MAX_REQUESTS = 100_000
"""What came of each is kept in memory until the end."""

MAX_RATE = 10_000.0
MAX_WAIT_MS = 1e6
MAX_TIME_LIMIT_S = 86_400.0

CONCURRENCY_HELP = (
    f"Requests at a time [{DEFAULT_CONCURRENCY}, or as many as --rate makes]; with --rate at most."
)
TOKENS = TokenSpan(1, MAX_TOKENS)


@click.command
@click.option(
    "--requests",
    type=click.IntRange(1, MAX_REQUESTS),
    default=DEFAULT_REQUESTS,
    metavar="N",
    help=f"How many [{DEFAULT_REQUESTS}].",
)
@click.option(
    "--concurrency", type=click.IntRange(1, MAX_CONCURRENCY), metavar="N", help=CONCURRENCY_HELP
)
@click.option(
    "--rate",
    type=Number(0, MAX_RATE, min_open=True),
    metavar="R",
    help="Send R a second on average, at random moments, whatever became of those before.",
)
@click.option(
    "--prompt-tokens",
    type=TOKENS,
    default=DEFAULT_PROMPT_TOKENS,
    metavar="N[-M]",
    help=f"Length of prompts, or a range of it [{DEFAULT_PROMPT_TOKENS}].",
)
@click.option(
    "--answer-tokens",
    type=TOKENS,
    default=DEFAULT_ANSWER_TOKENS,
    metavar="N[-M]",
    help=f"Length of answers, or a range of it [{DEFAULT_ANSWER_TOKENS}].",
)
@click.option(
    "--shared-prefix",
    type=click.IntRange(0, MAX_TOKENS),
    default=0,
    metavar="N",
    help="Begin all prompts with the same N tokens, which the prefix cache may find.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, MAX_REQUESTS),
    default=DEFAULT_WARMUP,
    metavar="N",
    help=f"Requests before, which are not counted [{DEFAULT_WARMUP}].",
)
@click.option(
    "--seed",
    type=click.IntRange(0, MAX_SEED),
    default=0,
    metavar="N",
    help="Of lengths and arrivals; the prompts' tokens are always new [0].",
)
@click.option(
    "--ttft-slo-ms",
    type=Number(0, MAX_WAIT_MS),
    metavar="MS",
    help="Count the answers whose first token comes within MS.",
)
@click.option(
    "--itl-slo-ms",
    type=Number(0, MAX_WAIT_MS),
    metavar="MS",
    help="Count the answers in which no token comes more than MS after the one before.",
)
@click.option(
    "--time-limit",
    type=Number(0, MAX_TIME_LIMIT_S, min_open=True),
    default=DEFAULT_TIME_LIMIT_S,
    metavar="SECONDS",
    help=f"Cut what still runs then, warm-up included, and show what came "
    f"[{DEFAULT_TIME_LIMIT_S:g}].",
)
@click.option("--json", "is_json", is_flag=True, help="Print one JSON object.")
@socket_option
def bench(
    *,
    requests: int,
    concurrency: int | None,
    rate: float | None,
    prompt_tokens: tuple[int, int],
    answer_tokens: tuple[int, int],
    shared_prefix: int,
    warmup: int,
    seed: int,
    ttft_slo_ms: float | None,
    itl_slo_ms: float | None,
    time_limit: float,
    is_json: bool,
    socket: str | None,
) -> ExitCode:
    """Measure how fast the running pair answers.

    Sends prompts of random tokens and tells when their answers' tokens came: the first, the second,
    which decoded makes, and all others, apart for the time in which prefilld computed somebody's
    prompt.

    Ctrl-C shows what came until then. `kvpair up -- kvpair bench` measures a pair of its own.
    """
    if shared_prefix > prompt_tokens[0]:
        raise UsageError(
            f"--shared-prefix {shared_prefix} is longer than prompts of {prompt_tokens[0]} tokens"
        )
    from shared.cli.bench_trial import Trial, look  # noqa: PLC0415  numpy is not for `--help`

    load = Load(
        num_requests=requests,
        concurrency=concurrency if rate is not None else concurrency or DEFAULT_CONCURRENCY,
        rate=rate,
        prompt_tokens=Span(low=prompt_tokens[0], high=prompt_tokens[1]),
        answer_tokens=Span(low=answer_tokens[0], high=answer_tokens[1]),
        num_shared_tokens=shared_prefix,
        seed=seed,
    )
    trial = Trial(
        target=look(client_socket(os.environ, chosen=socket)),
        load=load,
        num_warmup=warmup,
        slo=Slo(ttft_ms=ttft_slo_ms, itl_ms=itl_slo_ms),
        time_limit_s=time_limit,
    )
    told = trial.run()
    _report(told, is_json=is_json)
    return _exit_code(told)


def _report(told: Told, *, is_json: bool) -> None:
    """Print figures on stdout, and what a reader must know before believing them on stderr."""
    from shared.cli import bench_view  # noqa: PLC0415  as in `bench`

    if is_json:
        click.echo(json.dumps(bench_view.as_json(told), indent=2))
    else:
        for line in bench_view.heading(told):
            click.echo(line)
        _print_table(told)
    for line in bench_view.doubts(told):
        click.echo(f"kvpair: {line}", err=True)


def _print_table(told: Told) -> None:
    from rich.console import Console  # noqa: PLC0415  for people only: it costs as much as the rest

    from shared.cli import bench_view  # noqa: PLC0415  as in `bench`

    console = Console(file=sys.stdout, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:  # whoever reads lines wants each row on one
        console.width = PIPE_COLUMNS
    console.print(bench_view.table(told.figures, has_rate=told.load.rate is not None))


def _exit_code(told: Told) -> ExitCode:
    """Return how the command ends; where nothing was answered, as a single request would have."""
    if told.stopped_by == "interrupt":
        return ExitCode.INTERRUPTED
    if not told.figures.num_completed:
        codes = {failure.exit_code for failure in told.failures}
        return codes.pop() if len(codes) == 1 else ExitCode.FAILED
    return ExitCode.FAILED if told.failures else ExitCode.OK
