"""Judges a request before anything is spent on it: text to tokens, limits, and whether it can fit.

A request that can never be served is refused here, at once and with the numbers; what passes can
only wait.  Tokenising a long prompt takes long, so the daemon calls this on a thread of its own.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec

from prefilld.handoff_messages import largest_handoff_bytes
from prefilld.request import Prompt
from protocol.errors import RequestError
from protocol.limits import (
    MAX_LINK_BODY_BYTES,
    MAX_SEED,
    MAX_TOKEN_BITMAP_BYTES,
)
from protocol.messages import (
    ChatMessage,
    Check,
    Checked,
    Generate,
    Resume,
    Sampling,
)
from shared.kv.block_hashes import block_hashes
from shared.model.errors import ChatTemplateError, PromptError, PromptTooLargeError
from shared.ops.token_bitmap import pack_tokens

if TYPE_CHECKING:
    from shared.kv.layout import KVLayout
    from shared.model.chat_template import ChatTemplate
    from shared.model.spec import ModelSpec
    from shared.model.tokenizer import Tokenizer


QUICK_IDS, QUICK_CHARACTERS = 2048, 1024
"""Of a prompt whose judgement takes some 0.3 ms: as long as it takes to wake two threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a request must fit into."""

    prefill_blocks: int
    """Blocks of prefilld's pool that one request can have at most."""
    decode_blocks: int
    """The same of decoded's pool."""
    max_tokens_default: int
    is_direct: bool = False
    """decoded reads whole blocks of prompts in place, and needs none of its own for them."""


class Admission:
    """The judge.  Thread-safe: it changes nothing.

    Args:
        tokenizer: Turns text into tokens.
        template: Turns a chat into text; None where the model has none.
        spec: The model's.
        layout: Of prefilld's pool.
        fingerprint: A resumed request's must be the same.
        hash_root: What hashes of blocks are chained to; None where the prefix cache is off.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        spec: ModelSpec,
        layout: KVLayout,
        fingerprint: str,
        hash_root: bytes | None = None,
    ) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._spec, self._layout, self._fingerprint = spec, layout, fingerprint
        self._hash_root = hash_root

    def is_quick(self, message: Generate | Check) -> bool:
        """Whether judging takes no longer than to have another thread do it."""
        prompt = message.prompt
        num_resumed = 0 if message.resume is None else len(message.resume.ids)
        if num_resumed > QUICK_IDS:
            return False
        if isinstance(prompt, str):
            is_plain = message.raw or self._template is None
            return is_plain and len(prompt) <= QUICK_CHARACTERS
        return len(prompt) <= QUICK_IDS and not any(
            isinstance(item, ChatMessage) for item in prompt[:1]
        )

    def judge(self, message: Generate | Check, bounds: Bounds) -> Prompt:
        """Turn a request into tokens and check it wholly.

        Raises:
            RequestError: `invalid-request`, `too-large` or `model-changed`, with the reason.
        """
        ids = self._tokenise(message)
        resumed_ids = self._resumed(message.resume)
        self._check_ids([*resumed_ids, *message.stop_ids], "`resume.ids` and `stop_ids`")
        self._check_ids([entry.id for entry in message.sampling.logit_bias], "`logit_bias`")
        max_tokens = self._max_tokens(message, len(ids), bounds)
        if len(resumed_ids) > max_tokens:
            raise RequestError(
                "invalid-request",
                f"`resume` brings {len(resumed_ids)} tokens of an answer of at most {max_tokens}",
            )
        if message.min_tokens > max_tokens:
            raise RequestError(
                "invalid-request",
                f"`min_tokens` is {message.min_tokens}, but at most {max_tokens} fit",
            )
        eos_ids = [] if message.ignore_eos else list(self._spec.eos_ids)
        prompt = Prompt(
            ids=ids,
            resumed_ids=resumed_ids,
            max_tokens=max_tokens,
            min_tokens=message.min_tokens,
            sampling=self._resolve_seed(message),
            stop=list(message.stop),
            stop_ids=sorted({*message.stop_ids, *eos_ids}),
            stream=message.stream,
            logprobs=message.logprobs,
            prompt_set=self._prompt_set(message, ids),
            num_blocks=self._layout.num_blocks_for(len(ids) + len(resumed_ids)),
            block_hashes=self._block_hashes([*ids, *resumed_ids]),
            start_blocks=self._layout.num_blocks_for(len(ids) + len(resumed_ids) + 1),
            total_blocks=self._layout.num_blocks_for(len(ids) + max_tokens),
        )
        self._check_fit(prompt, bounds)
        return prompt

    def check(self, message: Check, bounds: Bounds) -> Checked:
        """Answer CHECK: the numbers, and whether the request would be taken.

        Raises:
            RequestError: The request is invalid, whatever its size.
        """
        try:
            prompt = self.judge(message, bounds)
        except RequestError as error:
            if error.code != "too-large":
                raise
            return self._unfit(message, bounds)
        return Checked(
            prompt_tokens=len(prompt.ids),
            max_tokens=prompt.max_tokens,
            blocks=prompt.num_blocks,
            total_blocks=prompt.total_blocks,
            fits=True,
        )

    def _unfit(self, message: Check, bounds: Bounds) -> Checked:
        """Return the numbers of a request that can never be served."""
        try:
            num_tokens = len(self._tokenise(message))
        except RequestError:  # too long to be tokenised: the least that it can be
            num_tokens = self._spec.max_context_tokens + 1
        num_resumed = 0 if message.resume is None else len(message.resume.ids)
        wanted = message.max_tokens or bounds.max_tokens_default
        return Checked(
            prompt_tokens=num_tokens,
            max_tokens=wanted,
            blocks=self._layout.num_blocks_for(num_tokens + num_resumed),
            total_blocks=self._layout.num_blocks_for(num_tokens + wanted),
            fits=False,
        )

    def _tokenise(self, message: Generate | Check) -> list[int]:
        text: str
        match message.prompt:
            case str(plain) if message.raw or self._template is None:
                text = plain
            case str(plain):
                text = self._render([ChatMessage(role="user", content=plain)])
            case [ChatMessage(), *_]:
                chat = [item for item in message.prompt if isinstance(item, ChatMessage)]
                text = self._render(chat)
            case _:
                ids = list(cast("list[int]", message.prompt))  # the schema lets nothing be mixed
                self._check_ids(ids, "`prompt`")
                return ids
        try:
            ids = self._tokenizer.encode(text, max_tokens=self._spec.max_context_tokens)
        except PromptTooLargeError as error:
            raise RequestError("too-large", str(error)) from error
        except PromptError as error:
            raise RequestError("invalid-request", str(error)) from error
        if not ids:
            raise RequestError("invalid-request", "the prompt has no tokens")
        return ids

    def _render(self, messages: list[ChatMessage]) -> str:
        if self._template is None:
            raise RequestError(
                "invalid-request", "this model has no chat template; send text with `raw`"
            )
        try:
            return self._template.render([msgspec.to_builtins(message) for message in messages])
        except ChatTemplateError as error:
            raise RequestError("invalid-request", str(error)) from error

    def _check_ids(self, ids: list[int], where: str) -> None:
        vocab_size = self._spec.vocab_size
        if ids and (largest := max(ids)) >= vocab_size:
            raise RequestError(
                "invalid-request",
                f"{where}: token id {largest} is outside the vocabulary of {vocab_size}",
            )

    def _resumed(self, resume: Resume | None) -> list[int]:
        if resume is None:
            return []
        if resume.fingerprint != self._fingerprint:
            raise RequestError(
                "model-changed",
                f"the answer was begun by model {resume.fingerprint}, "
                f"this daemon serves {self._fingerprint}; ask again from the start",
            )
        return list(resume.ids)

    def _max_tokens(self, message: Generate | Check, num_prompt: int, bounds: Bounds) -> int:
        context = self._spec.max_context_tokens
        if num_prompt >= context:
            raise RequestError(
                "too-large",
                f"the prompt has {num_prompt} tokens, the model's context {context}; shorten it",
            )
        left = context - num_prompt
        if message.max_tokens is None:
            num_there = num_prompt % self._layout.block_size if bounds.is_direct else num_prompt
            fits = bounds.decode_blocks * self._layout.block_size - num_there
            return max(1, min(left, bounds.max_tokens_default, fits))
        if message.max_tokens > left:
            raise RequestError(
                "too-large",
                f"a prompt of {num_prompt} tokens and an answer of {message.max_tokens} exceed "
                f"the model's context of {context}; at most {left} can be asked for",
            )
        return message.max_tokens

    def _prompt_set(self, message: Generate | Check, ids: list[int]) -> bytes:
        if message.sampling.repetition_penalty == 1:
            return b""
        prompt_set = pack_tokens(ids, self._spec.vocab_size)
        if len(prompt_set) > MAX_TOKEN_BITMAP_BYTES:
            raise RequestError(
                "invalid-request",
                f"a repetition penalty works with up to {8 * MAX_TOKEN_BITMAP_BYTES} tokens, "
                f"this model has {self._spec.vocab_size}",
            )
        return prompt_set

    @staticmethod
    def _resolve_seed(message: Generate | Check) -> Sampling:
        seed = message.sampling.seed
        if message.resume is not None:
            seed = message.resume.seed
        if seed is None:
            seed = secrets.randbelow(MAX_SEED + 1)
        return msgspec.structs.replace(message.sampling, seed=seed)

    def _block_hashes(self, token_ids: list[int]) -> tuple[bytes, ...]:
        if self._hash_root is None:
            return ()
        block_size = self._layout.block_size
        return block_hashes(token_ids, block_size=block_size, root=self._hash_root)

    def _check_fit(self, prompt: Prompt, bounds: Bounds) -> None:
        num_in_place = prompt.num_in_place(self._layout.block_size, is_direct=bounds.is_direct)
        whole_blocks = prompt.total_blocks - num_in_place  # alone in its pool, it must fit
        for blocks, room, whose in (
            (prompt.num_blocks, bounds.prefill_blocks, "prefilld's pool ([pool] num_blocks)"),
            (whole_blocks, bounds.decode_blocks, "decoded's pool ([decoded] num_blocks)"),
        ):
            if blocks > room:
                raise RequestError(
                    "too-large",
                    f"the request needs {blocks} blocks of {self._layout.block_size} tokens, "
                    f"{whose} has {room}",
                )
        size = largest_handoff_bytes(prompt)
        if size > MAX_LINK_BODY_BYTES:
            raise RequestError(
                "too-large",
                f"handing the request over would take {size} bytes, "
                f"the link carries {MAX_LINK_BODY_BYTES}",
            )
