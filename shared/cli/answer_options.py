"""The flags that say what answer is wanted, the same for every command that asks for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

import click

from protocol.limits import (
    MAX_LOGIT_BIASES,
    MAX_PENALTY,
    MAX_SEED,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_TEMPERATURE,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
)
from protocol.messages import LogitBias, Sampling
from shared.cli.parameters import TEXT, Number
from shared.errors import UsageError

if TYPE_CHECKING:
    from protocol.exchange import Options

Result = TypeVar("Result")

PENALTY = Number(-MAX_PENALTY, MAX_PENALTY)
REPETITION = Number(MIN_REPETITION_PENALTY, MAX_PENALTY)
TOP_P = Number(0, 1, min_open=True)

TOP_K_HELP = "Choose among the K likeliest tokens; needs a temperature."
TOP_P_HELP = "Choose among the likeliest that reach P; needs a temperature."
MIN_P_HELP = "Choose among those at least P times as likely as the best; needs a temperature."
SEED_HELP = "Repeat the same choices; needs a temperature."
REPETITION_HELP = "Above 1: say less of what prompt or answer have."
PRESENCE_HELP = "Above 0: say less of what the answer has."
FREQUENCY_HELP = "Above 0: the same, the more often the less."
BIAS_HELP = "Add BIAS to the logit of token ID; may be repeated."
STOP_HELP = "End before TEXT; may be repeated."
MIN_TOKENS_HELP = "Do not end the answer before N tokens."


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags:
    """What the flags say of the answer."""

    max_tokens: int | None
    min_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    sampling: Sampling
    wants_temperature: str | None
    """A flag that does nothing without a temperature, where none was named."""

    def check_alone(self) -> None:
        """Refuse what would be taken and do nothing, where nobody else can name a temperature.

        Raises:
            UsageError: A flag that chooses among tokens was given without one.
        """
        if self.wants_temperature is not None:
            raise UsageError(
                f"{self.wants_temperature} needs a temperature",
                hint="add --temperature, such as 0.8; without it the likeliest token is taken",
            )

    def options(self) -> Options:
        """Return the request's options."""
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": self.stop,
            "ignore_eos": self.ignore_eos,
            "sampling": self.sampling,
        }


_OPTIONS = (
    click.option(
        "--max-tokens",
        type=click.IntRange(1, MAX_TOKENS),
        metavar="N",
        help="End the answer after N tokens.",
    ),
    click.option(
        "--min-tokens",
        type=click.IntRange(0, MAX_TOKENS),
        default=0,
        metavar="N",
        help=MIN_TOKENS_HELP,
    ),
    click.option(
        "--temperature",
        type=Number(0, MAX_TEMPERATURE),
        metavar="T",
        help="0, the default, is greedy.",
    ),
    click.option("--top-k", type=click.IntRange(0, MAX_TOP_K), metavar="K", help=TOP_K_HELP),
    click.option("--top-p", type=TOP_P, metavar="P", help=TOP_P_HELP),
    click.option("--min-p", type=Number(0, 1), metavar="P", help=MIN_P_HELP),
    click.option("--seed", type=click.IntRange(0, MAX_SEED), metavar="N", help=SEED_HELP),
    click.option("--repetition-penalty", type=REPETITION, metavar="R", help=REPETITION_HELP),
    click.option("--presence-penalty", type=PENALTY, metavar="X", help=PRESENCE_HELP),
    click.option("--frequency-penalty", type=PENALTY, metavar="X", help=FREQUENCY_HELP),
    click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help=BIAS_HELP),
    click.option("--stop", type=TEXT, multiple=True, metavar="TEXT", help=STOP_HELP),
    click.option("--ignore-eos", is_flag=True, help="Go on where the model would end."),
)

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Flags that are fields of `Sampling`."""


_IDLE = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Flags that choose among tokens, with the value that leaves all of them.  Where no temperature is
named the choice is greedy, and they do nothing."""


def answer_options(command: Callable[..., Result]) -> Callable[..., Result]:
    """Add the flags; the command receives `answer: AnswerFlags`."""

    @wraps(command)
    def with_flags(**parameters: object) -> Result:
        chosen = {name: parameters.pop(name) for name in _SAMPLING}
        rest = {name: parameters.pop(name) for name in ("max_tokens", "min_tokens", "ignore_eos")}
        stop, bias = parameters.pop("stop"), parameters.pop("logit_bias")
        assert isinstance(stop, tuple)
        assert isinstance(bias, tuple)
        answer = AnswerFlags(
            stop=_stop(stop),
            sampling=_sampling(chosen, bias),
            wants_temperature=_wanting(chosen),
            **rest,  # type: ignore[arg-type]  # click has checked them
        )
        _check_lengths(answer)
        return command(answer=answer, **parameters)

    for option in reversed(_OPTIONS):
        with_flags = option(with_flags)
    return with_flags


def _wanting(given: dict[str, object]) -> str | None:
    """Return a flag that needs a temperature, where none is given."""
    if given["temperature"] is not None:
        return None
    wanting = (name for name, idle in _IDLE.items() if given[name] not in (None, idle))
    return next((f"--{name.replace('_', '-')}" for name in wanting), None)


def _sampling(given: dict[str, object], bias: tuple[str, ...]) -> Sampling:
    """Return what the flags say; the message's own defaults stand for the rest."""
    if len(bias) > MAX_LOGIT_BIASES:
        raise UsageError(f"--logit-bias is given {len(bias)} times; {MAX_LOGIT_BIASES} is the most")
    entries = [_bias(text) for text in bias]
    try:
        return Sampling(
            logit_bias=entries,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]  # click has checked them
        )
    except ValueError as error:
        raise UsageError("--logit-bias names a token twice") from error


def _bias(text: str) -> LogitBias:
    token_id, is_pair, bias = text.partition("=")
    try:
        entry = LogitBias(id=int(token_id), bias=float(bias))
    except ValueError:
        entry = None
    if entry is None or not is_pair:
        raise UsageError(
            f"--logit-bias {text!r} is no ID=BIAS", hint="such as --logit-bias 42=-1.5"
        )
    if not 0 <= entry.id <= MAX_TOKEN_ID:
        raise UsageError(f"--logit-bias {text!r}: the id must be from 0 to {MAX_TOKEN_ID}")
    if not abs(entry.bias) <= MAX_PENALTY:  # false for NaN as well
        raise UsageError(
            f"--logit-bias {text!r}: the bias must be from -{MAX_PENALTY:g} to {MAX_PENALTY:g}"
        )
    return entry


def _stop(strings: tuple[str, ...]) -> tuple[str, ...]:
    if "" in strings:
        raise UsageError("--stop needs a text that is not empty")
    if len(strings) > MAX_STOP_STRINGS:
        raise UsageError(f"--stop is given {len(strings)} times; {MAX_STOP_STRINGS} is the most")
    if any(len(string) > MAX_STOP_STRING_CHARACTERS for string in strings):
        raise UsageError(f"--stop takes at most {MAX_STOP_STRING_CHARACTERS} characters")
    return strings


def _check_lengths(answer: AnswerFlags) -> None:
    if answer.max_tokens is not None and answer.min_tokens > answer.max_tokens:
        raise UsageError(
            f"--min-tokens {answer.min_tokens} is above --max-tokens {answer.max_tokens}"
        )
