"""What clients and daemons say to each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, field

from protocol import limits
from protocol.fields import (
    Count,
    Logprob,
    Message,
    NumLogprobs,
    Part,
    Penalty,
    RequestId,
    Seed,
    StopString,
    TokenId,
    TokenIds,
)
from protocol.plain import check_plain
from protocol.timings import Timings

# --- what a request is made of -----------------------------------------------------------


class ChatMessage(Part, frozen=True, kw_only=True):
    """One turn of a conversation, rendered by the model's chat template."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str


class LogitBias(Part, frozen=True, kw_only=True):
    """What is added to one token's logit."""

    id: TokenId
    bias: Penalty


class Sampling(Part, frozen=True, kw_only=True):
    """How the next token is chosen; bias and penalties come before the temperature.

    Temperature 0 is greedy: top-k, top-p, min-p and the seed are ignored then.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=limits.MAX_TEMPERATURE)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=limits.MAX_TOP_K)] = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities reach p; 1 keeps all."""
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    """Keep tokens at least this likely, as a share of the likeliest one's probability."""
    seed: Seed | None = None
    """None lets prefilld draw one; ACCEPTED tells which."""
    repetition_penalty: Annotated[
        float, Meta(ge=limits.MIN_REPETITION_PENALTY, le=limits.MAX_PENALTY)
    ] = 1.0
    """Divides the logits of tokens that prompt or answer have, or multiplies those below 0."""
    presence_penalty: Penalty = 0.0
    """Taken once from the logit of each token that the answer has."""
    frequency_penalty: Penalty = 0.0
    """Taken from a token's logit as often as the answer has it."""
    logit_bias: Annotated[list[LogitBias], Meta(max_length=limits.MAX_LOGIT_BIASES)] = field(
        default_factory=list
    )
    """What is added to the logits of some tokens, each named once."""

    def __post_init__(self) -> None:
        """Raise ValueError for what single fields cannot say."""
        if len({entry.id for entry in self.logit_bias}) != len(self.logit_bias):
            raise ValueError("`logit_bias` names a token twice")


class Resume(Part, frozen=True, kw_only=True):
    """What a client already has of an answer that was cut off."""

    attempt: Annotated[int, Meta(ge=1, le=limits.MAX_ATTEMPT)]
    """Which resumption of the answer this is."""
    seed: Seed
    fingerprint: Annotated[str, Meta(min_length=1, max_length=128)]
    """The model fingerprint that ACCEPTED gave; another model is `model-changed`."""
    ids: TokenIds
    """The tokens delivered so far; the answer goes on behind them."""


# --- client -> prefilld ------------------------------------------------------------------


class _Request(Message, frozen=True, kw_only=True):
    """What GENERATE and CHECK share."""

    prompt: str | list[ChatMessage | TokenId]
    """Text, chat messages, or token ids (then no template and no special token is added)."""
    id: RequestId | None = None
    """Ties the request's log lines together; None lets prefilld draw one."""
    raw: bool = False
    """Take text as it is, without the chat template."""
    max_tokens: Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS)] | None = None
    """None takes the daemon's default, or less where context or pool have less room."""
    min_tokens: Annotated[int, Meta(ge=0, le=limits.MAX_TOKENS)] = 0
    """Neither stop strings nor stop ids nor the model's own end before so many tokens."""
    sampling: Sampling = Sampling()
    stop: Annotated[list[StopString], Meta(max_length=limits.MAX_STOP_STRINGS)] = field(
        default_factory=list
    )
    """The answer ends before the first of these; it is not part of the text."""
    stop_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_STOP_IDS)] = field(
        default_factory=list
    )
    """The answer ends with the first of these ids, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Do not end at the model's own end tokens."""
    stream: bool = True
    """False: the whole answer right before END, in one TOKENS frame unless `logprobs` make it too
    large for one."""
    logprobs: NumLogprobs | None = None
    """Tell how likely each token was to the model itself, before bias, penalties and temperature,
    with so many of the likeliest; None tells nothing."""
    resume: Resume | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for what single fields cannot say."""
        if isinstance(self.prompt, list):
            if not self.prompt:
                raise ValueError("`prompt` is an empty list")
            kinds = {type(item) for item in self.prompt}
            if len(kinds) > 1:
                raise ValueError("`prompt` mixes chat messages and token ids")
            if kinds == {ChatMessage} and len(self.prompt) > limits.MAX_MESSAGES:
                raise ValueError(f"`prompt` has more than {limits.MAX_MESSAGES} chat messages")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"`min_tokens` is {self.min_tokens}, above `max_tokens`, {self.max_tokens}"
            )


class Generate(_Request, tag="generate", frozen=True, kw_only=True):
    """Answer a prompt.  One connection carries one of these."""


class Check(_Request, tag="check", frozen=True, kw_only=True):
    """Judge a request without running it; CHECKED answers."""


class Cancel(Message, tag="cancel", frozen=True, kw_only=True):
    """End the running answer; END with reason `cancelled` follows."""


class StatusRequest(Message, tag="status-request", frozen=True, kw_only=True):
    """Ask for STATUS."""


class MetricsRequest(Message, tag="metrics-request", frozen=True, kw_only=True):
    """Ask for METRICS."""


# --- daemon -> client --------------------------------------------------------------------


class Accepted(Message, tag="accepted", frozen=True, kw_only=True):
    """The request passed every check and waits for its turn."""

    id: RequestId
    seed: Seed
    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens whose KV is in the prefix cache now; END tells how many were found there when
    the request's turn came."""
    fingerprint: str


class TokenLogprob(Part, frozen=True, kw_only=True):
    """How likely one token was, and the likeliest ones in its place."""

    logprob: Logprob
    top_ids: Annotated[list[TokenId], Meta(max_length=limits.MAX_TOP_LOGPROBS)]
    """The likeliest first."""
    top_logprobs: Annotated[list[Logprob], Meta(max_length=limits.MAX_TOP_LOGPROBS)]
    """Of `top_ids`."""


class Tokens(Message, tag="tokens", frozen=True, kw_only=True):
    """A run of the answer.  Ids leave only together with their whole text."""

    index: Count
    """Index in the answer of the first id."""
    ids: TokenIds
    text: str
    choice: Count = 0
    logprobs: (
        Annotated[list[TokenLogprob], Meta(max_length=limits.MAX_LOGPROBS_PER_FRAME)] | None
    ) = None
    """One for each of `ids`, where the request asked."""

    def __post_init__(self) -> None:
        """Raise ValueError for what single fields cannot say."""
        if self.logprobs is not None and len(self.logprobs) != len(self.ids):
            raise ValueError(f"{len(self.ids)} `ids` have {len(self.logprobs)} `logprobs`")


class Usage(Part, frozen=True, kw_only=True):
    """Token counts of a finished request."""

    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens whose KV was found in the prefix cache."""
    completion_tokens: Count


class End(Message, tag="end", frozen=True, kw_only=True):
    """The last message of an answer."""

    reason: Annotated[str, Meta(pattern=r"^(stop|length|cancelled)\Z")]
    usage: Usage
    timings_ms: Timings


class Error(Message, tag="error", frozen=True, kw_only=True):
    """The last message of a request that failed; `errors.py` lists the codes."""

    code: Annotated[str, Meta(min_length=1, max_length=64)]
    message: str
    retryable: bool
    retry_after_ms: Count = 0


class Checked(Message, tag="checked", frozen=True, kw_only=True):
    """The answer to CHECK."""

    prompt_tokens: Count
    max_tokens: Count
    blocks: Count
    """Blocks of prefilld's pool that the prompt needs."""
    total_blocks: Count
    """Blocks of decoded's pool that prompt and answer need."""
    fits: bool


class Status(Message, tag="status", frozen=True, kw_only=True):
    """A daemon's state as a tree of plain values; the packages' READMEs list the keys."""

    status: dict[str, object]
    """Nested maps with string keys, lists, strings, finite numbers, booleans and nil."""

    def __post_init__(self) -> None:
        """Raise ValueError for what is not plain, or nested too deep."""
        check_plain(self.status, "status", limits.MAX_STATUS_DEPTH)


class Metrics(Message, tag="metrics", frozen=True, kw_only=True):
    """A daemon's metrics as Prometheus text."""

    text: str
