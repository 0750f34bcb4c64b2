"""A request while it is prefilld's: what was asked, how far it got, and when.

WAITING ──its blocks are free──► RUNNING ──first token──► READY ──HANDOFF──► SENT ──ADOPT──► gone
   ▲                                                        │  ▲                │
   └── (never back)                                         │  └──── link lost, REJECT
                                                            └──► ended here: END or ERROR
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefilld.clients import Client
    from protocol.messages import Sampling, TokenLogprob
    from shared.engine.history import TokenHistory
    from shared.kv.holds import Hold
    from shared.model.answer import AnswerAssembler


class RequestState(Enum):
    """Where a request stands; see the module's diagram."""

    WAITING = auto()
    RUNNING = auto()
    READY = auto()
    SENT = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request that passed every check, in engine terms."""

    ids: list[int]
    """The prompt's token ids."""
    resumed_ids: list[int]
    """The answer so far, where the request resumes one."""
    max_tokens: int
    """Of the whole answer, resumed ids included."""
    min_tokens: int = 0
    """The same; fewer do not end the answer."""
    sampling: Sampling
    """With its seed resolved."""
    stop: list[str]
    stop_ids: list[int]
    """With the model's own end tokens, unless they are ignored."""
    stream: bool
    logprobs: int | None = None
    """How many of the likeliest tokens to tell with each one's probability; None tells neither."""
    prompt_set: bytes = b""
    """The prompt's tokens as a bitmap, where repetition is penalised; else empty."""
    num_blocks: int
    """Of prefilld's pool, for `ids` and `resumed_ids`."""
    block_hashes: tuple[bytes, ...] = ()
    """Of the whole blocks of `ids` and `resumed_ids`; none where the prefix cache is off."""
    start_blocks: int
    """Of decoded's pool, for all that is computed here and the next token: it takes others one by
    one as the answer grows."""
    total_blocks: int
    """Of decoded's pool, for the prompt and the longest answer."""

    def num_in_place(self, block_size: int, *, is_direct: bool) -> int:
        """Return how many of these decoded needs no block for: it reads them where they are."""
        num_tokens = len(self.ids) + len(self.resumed_ids)
        return num_tokens // block_size if is_direct else 0


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One request and its progress.  Compared by identity."""

    id: str
    client: Client
    prompt: Prompt
    token_ids: list[int]
    """Everything to compute: the prompt, and the answer so far where it is resumed."""
    arrived_ns: int
    deadline_s: float
    """When to stop waiting for its next state, on the monotonic clock."""
    assembler: AnswerAssembler
    state: RequestState = RequestState.WAITING
    hold: Hold | None = None
    """Its blocks, once it has them; also after it gave them back."""
    launched_tokens: int = 0
    """Tokens whose computation was begun, or which the prefix cache had."""
    computed_tokens: int = 0
    """Tokens whose keys and values are in the pool."""
    num_in_flight: int = 0
    """Steps that are launched and not collected; they write `blocks`."""
    started_ns: int = 0
    first_token_ns: int = 0
    sent_ns: int = 0
    """When HANDOFF was given to the link."""
    prefill_device_ns: int | None = None
    """How long the steps that computed it took the GPU so far, by its clock; None on a CPU."""
    answer_ids: list[int] = field(default_factory=list)
    """The answer so far: resumed ids, then the first token."""
    delivered: int = 0
    """How many of `answer_ids` the client has."""
    history: TokenHistory | None = None
    """What its first token depends on beside the logits, once that is asked for."""
    held_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of the ids behind those, where the request asked for any."""
    lease_id: int | None = None
    """The lease under which decoded may read `blocks`, once one is open."""
    chunked_blocks: int = 0
    """How many of `blocks` CHUNKs have named under the present lease."""
    first_token_place: tuple[int, int] | None = None
    """Slot and generation under which the control page is to tell the first token, where decoded
    was asked to begin with it."""
    is_reserved: bool = False
    """decoded was asked to reserve room by a CHUNK, and did not answer NOCHUNK."""

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.token_ids)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Its blocks, in the order of its tokens; none before it was admitted."""
        return () if self.hold is None else self.hold.blocks

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose keys and values the prefix cache had."""
        cached_tokens = 0 if self.hold is None else self.hold.cached_tokens
        return min(cached_tokens, len(self.prompt.ids))
