"""The judge of requests: tokens, limits, and whether they can ever fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from prefilld.admission import Admission, Bounds
from prefilld.handoff_messages import largest_handoff_bytes
from prefilld.request import Prompt
from protocol.codec import encode_message, validate
from protocol.errors import RequestError
from protocol.limits import MAX_LINK_BODY_BYTES, MAX_SEED, MAX_TOP_LOGPROBS
from protocol.messages import (
    ChatMessage,
    Check,
    Generate,
    Handoff,
    LogitBias,
    RequestState,
    Resume,
    Sampling,
    TokenLogprob,
)
from shared.daemon.model_host import ModelHost
from shared.kv.block_hashes import block_hashes, root_hash
from shared.model.gguf_file import read_header
from shared.model.gguf_model import read_vocabulary
from shared.model.gguf_tokenizer import vocabulary_tokenizer
from shared.ops.token_bitmap import pack_tokens
from tests.support.tiny_gguf import TinyGguf

CONTEXT = 128
BLOCK = 16
VOCAB = 263
EOS = 0
ROOMY = Bounds(prefill_blocks=1_000, decode_blocks=1_000, max_tokens_default=32)


@pytest.fixture
def admission(host: ModelHost) -> Admission:
    assert (host.spec.max_context_tokens, host.spec.vocab_size) == (CONTEXT, VOCAB)
    return make(host)


def make(host: ModelHost, **changes: Any) -> Admission:  # noqa: ANN401 - Admission's own arguments
    options: dict[str, Any] = {
        "tokenizer": host.tokenizer,
        "template": host.template,
        "spec": host.spec,
        "layout": host.layout,
        "fingerprint": host.fingerprint,
    }
    return Admission(**options | changes)


def ids_of(num_tokens: int) -> list[Any]:
    return [2 + index % 256 for index in range(num_tokens)]


def resume(host: ModelHost, ids: list[int], **changes: Any) -> Resume:  # noqa: ANN401
    options: dict[str, Any] = {"attempt": 1, "seed": 7, "fingerprint": host.fingerprint}
    return Resume(ids=ids, **options | changes)


def refusal(
    admission: Admission, message: Generate | Check, bounds: Bounds = ROOMY
) -> RequestError:
    with pytest.raises(RequestError, match=r".+") as caught:
        admission.judge(message, bounds)
    assert not caught.value.retryable, "the same request can never pass"
    return caught.value


# --- text to tokens --------------------------------------------------------------------------


def test_plain_text_goes_through_the_chat_template(admission: Admission, host: ModelHost) -> None:
    prompt = admission.judge(Generate(prompt="hello"), ROOMY)
    assert host.tokenizer.decode(prompt.ids) == "user: hello\n"


def test_raw_text_is_taken_as_it_is(admission: Admission, host: ModelHost) -> None:
    prompt = admission.judge(Generate(prompt="hello", raw=True), ROOMY)
    assert host.tokenizer.decode(prompt.ids) == "hello"


def test_a_conversation_goes_through_the_chat_template(
    admission: Admission, host: ModelHost
) -> None:
    chat: list[ChatMessage | int] = [
        ChatMessage(role="system", content="be"),
        ChatMessage(role="user", content="hi"),
    ]
    prompt = admission.judge(Generate(prompt=chat), ROOMY)
    assert host.tokenizer.decode(prompt.ids) == "system: be\nuser: hi\n"


def test_without_a_template_text_is_taken_as_it_is(host: ModelHost) -> None:
    """A base model only continues text."""
    prompt = make(host, template=None).judge(Generate(prompt="hello"), ROOMY)
    assert host.tokenizer.decode(prompt.ids) == "hello"


def test_without_a_template_a_conversation_is_refused(host: ModelHost) -> None:
    chat: list[ChatMessage | int] = [ChatMessage(role="user", content="hi")]
    error = refusal(make(host, template=None), Generate(prompt=chat))
    assert error.code == "invalid-request"
    assert "no chat template; send text with `raw`" in error.message


def test_a_template_that_refuses_the_conversation_is_the_request_s_fault(
    host: ModelHost, tmp_path: Path
) -> None:
    from shared.model.chat_template import ChatTemplate

    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    try:
        error = refusal(make(host, template=template), Generate(prompt="hi"))
    finally:
        template.close()
    assert error.code == "invalid-request"
    assert "roles must alternate" in error.message


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Generate(prompt=[1] * 2048), True),
        (Generate(prompt=[1] * 2049), False),
        (Generate(prompt="x" * 1024, raw=True), True),
        (Generate(prompt="x" * 1025, raw=True), False),
        (Generate(prompt="x"), False),
        (Generate(prompt=[ChatMessage(role="user", content="x")]), False),
    ],
)
def test_what_takes_long_to_judge_is_not_quick(
    admission: Admission, message: Generate, *, expected: bool
) -> None:
    """Long texts and ids; and a chat template runs in another process."""
    assert admission.is_quick(message) is expected


def test_a_long_answer_to_resume_is_not_quick(admission: Admission, host: ModelHost) -> None:
    """Its ids are hashed as well."""
    resume = Resume(attempt=1, seed=1, fingerprint=host.fingerprint, ids=[1] * 2049)
    assert not admission.is_quick(Generate(prompt=[1], resume=resume))


def test_token_ids_are_taken_as_they_are(admission: Admission) -> None:
    assert admission.judge(Generate(prompt=[5, 1, 262]), ROOMY).ids == [5, 1, 262]


@pytest.mark.parametrize(
    "message",
    [
        Generate(prompt=[1, VOCAB]),
        Generate(prompt=[1], stop_ids=[VOCAB]),
    ],
    ids=["prompt", "stop_ids"],
)
def test_an_id_outside_the_vocabulary_is_refused(admission: Admission, message: Generate) -> None:
    """It would index behind the embedding's end."""
    error = refusal(admission, message)
    assert error.code == "invalid-request"
    assert f"token id {VOCAB} is outside the vocabulary of {VOCAB}" in error.message


def test_a_resumed_id_outside_the_vocabulary_is_refused(
    admission: Admission, host: ModelHost
) -> None:
    error = refusal(admission, Generate(prompt=[1], resume=resume(host, [VOCAB])))
    assert error.code == "invalid-request"
    assert "`resume.ids`" in error.message


def test_an_empty_prompt_is_refused(admission: Admission) -> None:
    error = refusal(admission, Generate(prompt="", raw=True))
    assert (error.code, error.message) == ("invalid-request", "the prompt has no tokens")


def test_a_character_without_tokens_is_named(host: ModelHost, tmp_path: Path) -> None:
    recipe = TinyGguf()
    tokens, kind = recipe.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    changed = ["absent" if token == "Q" else token for token in tokens]
    recipe.metadata["tokenizer.ggml.tokens"] = (changed, kind)
    path = recipe.write(tmp_path / "m.gguf")
    tokenizer = vocabulary_tokenizer(read_vocabulary(read_header(path)), source=path)
    error = refusal(make(host, tokenizer=tokenizer), Generate(prompt="a Q", raw=True))
    assert error.code == "invalid-request"
    assert "U+0051" in error.message


# --- context and length ----------------------------------------------------------------------


def test_a_prompt_may_leave_room_for_one_token(admission: Admission) -> None:
    prompt = admission.judge(Generate(prompt=ids_of(CONTEXT - 1), max_tokens=1), ROOMY)
    assert (len(prompt.ids), prompt.max_tokens) == (CONTEXT - 1, 1)


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 5])
def test_a_prompt_that_fills_the_context_is_too_large(
    admission: Admission, num_tokens: int
) -> None:
    error = refusal(admission, Generate(prompt=ids_of(num_tokens)))
    assert error.code == "too-large"
    assert error.message == (
        f"the prompt has {num_tokens} tokens, the model's context {CONTEXT}; shorten it"
    )


def test_a_text_far_beyond_the_context_is_too_large_without_being_tokenised(
    admission: Admission,
) -> None:
    error = refusal(admission, Generate(prompt="x" * 1_000_000, raw=True))
    assert error.code == "too-large"
    assert "at least" in error.message


def test_an_answer_that_leaves_the_context_is_too_large_and_told_what_is_left(
    admission: Admission,
) -> None:
    error = refusal(admission, Generate(prompt=ids_of(100), max_tokens=29))
    assert error.code == "too-large"
    assert "at most 28 can be asked for" in error.message
    assert admission.judge(Generate(prompt=ids_of(100), max_tokens=28), ROOMY).max_tokens == 28


@pytest.mark.parametrize(
    ("num_prompt", "default", "decode_blocks", "expected"),
    [
        (10, 32, 1_000, 32),  # the configured default
        (120, 32, 1_000, 8),  # what is left of the context
        (10, 32, 2, 22),  # what fits decoded's pool
        (32, 32, 2, 1),  # nothing fits: one token, which the check of the pools then refuses
    ],
)
def test_without_max_tokens_an_answer_is_as_long_as_default_context_and_pool_allow(
    admission: Admission, num_prompt: int, default: int, decode_blocks: int, expected: int
) -> None:
    bounds = Bounds(prefill_blocks=1_000, decode_blocks=decode_blocks, max_tokens_default=default)
    message = Generate(prompt=ids_of(num_prompt))
    if expected == 1:
        assert "decoded's pool" in refusal(admission, message, bounds).message
    else:
        assert admission.judge(message, bounds).max_tokens == expected


# --- pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_blocks_are_counted_for_prompt_next_token_and_longest_answer(
    admission: Admission, num_tokens: int
) -> None:
    """It takes room for the second at decoded, and the third must fit its pool alone."""
    prompt = admission.judge(Generate(prompt=ids_of(num_tokens), max_tokens=20), ROOMY)
    assert prompt.num_blocks == -(-num_tokens // BLOCK)
    assert prompt.start_blocks == -(-(num_tokens + 1) // BLOCK)
    assert prompt.total_blocks == -(-(num_tokens + 20) // BLOCK)


def test_a_prompt_that_can_never_fit_prefilld_s_pool_is_refused_with_both_numbers(
    admission: Admission,
) -> None:
    """Waiting would be for ever."""
    bounds = dataclasses.replace(ROOMY, prefill_blocks=2)
    error = refusal(admission, Generate(prompt=ids_of(33), max_tokens=1), bounds)
    assert error.code == "too-large"
    assert error.message == (
        "the request needs 3 blocks of 16 tokens, prefilld's pool ([pool] num_blocks) has 2"
    )
    admission.judge(Generate(prompt=ids_of(32), max_tokens=1), bounds)


def test_an_answer_that_can_never_fit_decoded_s_pool_is_refused_with_both_numbers(
    admission: Admission,
) -> None:
    bounds = dataclasses.replace(ROOMY, decode_blocks=3)
    error = refusal(admission, Generate(prompt=ids_of(16), max_tokens=33), bounds)
    assert error.code == "too-large"
    assert error.message == (
        "the request needs 4 blocks of 16 tokens, decoded's pool ([decoded] num_blocks) has 3"
    )
    admission.judge(Generate(prompt=ids_of(16), max_tokens=32), bounds)


def long_context(host: ModelHost) -> Admission:
    return make(host, spec=dataclasses.replace(host.spec, max_context_tokens=1 << 20))


def test_a_request_whose_handoff_exceeds_a_frame_is_refused_before_it_is_computed(
    host: ModelHost,
) -> None:
    """The link would break on it, and on it again after every reconnect."""
    bounds = Bounds(prefill_blocks=65_535, decode_blocks=65_535, max_tokens_default=1)
    message = Generate(prompt=[1], max_tokens=300_000, resume=resume(host, [5] * 200_000))
    error = refusal(long_context(host), message, bounds)
    assert error.code == "too-large"
    assert f"the link carries {MAX_LINK_BODY_BYTES}" in error.message
    smaller = Generate(prompt=[1], max_tokens=300_000, resume=resume(host, [5] * 100_000))
    long_context(host).judge(smaller, bounds)


def test_no_handoff_is_larger_than_it_was_judged(admission: Admission, host: ModelHost) -> None:
    """The largest values that the schemas allow, for one and the same request."""
    message = Generate(
        prompt=ids_of(100),
        max_tokens=28,
        stop=["é" * 1024] * 16,
        stop_ids=ids_of(200),
        sampling=Sampling(
            temperature=1.5,
            top_p=0.25,
            top_k=1 << 20,
            repetition_penalty=1.5,
            logit_bias=[LogitBias(id=token_id, bias=-100.0) for token_id in range(VOCAB)],
        ),
        resume=resume(host, ids_of(10), seed=MAX_SEED),
        min_tokens=28,
        logprobs=MAX_TOP_LOGPROBS,
    )
    prompt = admission.judge(message, ROOMY)
    largest = largest_handoff(prompt)
    validate(largest)
    assert len(encode_message(largest)) <= largest_handoff_bytes(prompt)


def largest_handoff(prompt: Prompt) -> Handoff:
    state = RequestState(
        id="x" * 64,
        prompt_tokens=len(prompt.ids),
        cached_tokens=len(prompt.ids),
        ids=[*prompt.resumed_ids, (1 << 31) - 1],
        delivered=len(prompt.resumed_ids),
        resumed=len(prompt.resumed_ids),
        max_tokens=prompt.max_tokens,
        min_tokens=prompt.min_tokens,
        sampling=prompt.sampling,
        prompt_set=prompt.prompt_set,
        logprobs=prompt.logprobs,
        held_logprobs=[
            TokenLogprob(
                logprob=-0.1,
                top_ids=[(1 << 31) - 1] * MAX_TOP_LOGPROBS,
                top_logprobs=[-0.1] * MAX_TOP_LOGPROBS,
            )
        ],
        stop=prompt.stop,
        stop_ids=prompt.stop_ids,
        stream=False,
        arrived_ns=1 << 62,
        started_ns=1 << 62,
        first_token_ns=1 << 62,
    )
    return Handoff(
        epoch=bytes(16),
        lease=1 << 62,
        slot=65_535,
        generation=1 << 62,
        blocks=[(1 << 31) - 1] * prompt.num_blocks,
        num_tokens=len(prompt.ids) + len(prompt.resumed_ids),
        total_blocks=prompt.total_blocks,
        request=state,
        residue=bytes(65_536),
        sent_ns=1 << 62,
    )


# --- stops, seeds, resuming ------------------------------------------------------------------


def test_the_model_s_end_tokens_stop_beside_the_request_s(admission: Admission) -> None:
    prompt = admission.judge(Generate(prompt=[1], stop_ids=[9, 4, 9]), ROOMY)
    assert prompt.stop_ids == [EOS, 4, 9]


def test_ignored_end_tokens_leave_the_request_s_own(admission: Admission) -> None:
    prompt = admission.judge(Generate(prompt=[1], stop_ids=[9], ignore_eos=True), ROOMY)
    assert prompt.stop_ids == [9]


def test_a_given_seed_is_kept_also_when_it_is_zero(admission: Admission) -> None:
    for seed in (0, 5, MAX_SEED):
        message = Generate(prompt=[1], sampling=Sampling(temperature=0.5, seed=seed))
        assert admission.judge(message, ROOMY).sampling == message.sampling


def test_without_a_seed_one_is_drawn_and_everything_else_kept(admission: Admission) -> None:
    message = Generate(prompt=[1], sampling=Sampling(temperature=0.5, top_k=3, top_p=0.5))
    first, second = (admission.judge(message, ROOMY).sampling for _ in range(2))
    assert first.seed is not None
    assert 0 <= first.seed <= MAX_SEED
    assert first.seed != second.seed
    assert (first.temperature, first.top_k, first.top_p) == (0.5, 3, 0.5)


def test_a_resumed_answer_goes_on_with_its_own_seed(admission: Admission, host: ModelHost) -> None:
    """Another one would continue an answer that was never begun."""
    message = Generate(prompt=[1], sampling=Sampling(seed=5), resume=resume(host, [4, 5]))
    prompt = admission.judge(message, ROOMY)
    assert prompt.sampling.seed == 7
    assert prompt.resumed_ids == [4, 5]


def test_a_resumed_answer_takes_blocks_for_what_it_brings_but_no_longer_answer(
    admission: Admission, host: ModelHost
) -> None:
    message = Generate(prompt=ids_of(16), max_tokens=16, resume=resume(host, ids_of(10)))
    prompt = admission.judge(message, ROOMY)
    assert (prompt.num_blocks, prompt.total_blocks) == (2, 2)


def test_an_answer_of_another_model_is_not_resumed(admission: Admission, host: ModelHost) -> None:
    message = Generate(prompt=[1], resume=resume(host, [4], fingerprint="another"))
    error = refusal(admission, message)
    assert error.code == "model-changed"
    assert "another" in error.message
    assert host.fingerprint in error.message


def test_more_resumed_tokens_than_the_answer_may_have_are_refused(
    admission: Admission, host: ModelHost
) -> None:
    error = refusal(
        admission, Generate(prompt=[1], max_tokens=3, resume=resume(host, [4, 5, 6, 7]))
    )
    assert error.code == "invalid-request"
    assert "`resume` brings 4 tokens of an answer of at most 3" in error.message
    whole = Generate(prompt=[1], max_tokens=4, resume=resume(host, [4, 5, 6, 7]))
    assert admission.judge(whole, ROOMY).max_tokens == 4


# --- CHECK -----------------------------------------------------------------------------------


def test_check_tells_the_numbers_of_a_request_that_fits(admission: Admission) -> None:
    checked = admission.check(Check(prompt=ids_of(20), max_tokens=30), ROOMY)
    assert (checked.prompt_tokens, checked.max_tokens, checked.blocks, checked.total_blocks) == (
        20,
        30,
        2,
        4,
    )
    assert checked.fits


def test_check_tells_the_numbers_of_a_request_that_cannot_fit(admission: Admission) -> None:
    """That is what CHECK is for, so it is no error."""
    bounds = dataclasses.replace(ROOMY, decode_blocks=3)
    checked = admission.check(Check(prompt=ids_of(20), max_tokens=30), bounds)
    assert (checked.prompt_tokens, checked.max_tokens, checked.blocks, checked.total_blocks) == (
        20,
        30,
        2,
        4,
    )
    assert not checked.fits


def test_check_of_an_invalid_request_is_an_error(admission: Admission) -> None:
    with pytest.raises(RequestError, match="outside the vocabulary"):
        admission.check(Check(prompt=[VOCAB]), ROOMY)


def test_check_of_a_text_that_is_too_long_to_tokenise_does_not_fit(admission: Admission) -> None:
    assert not admission.check(Check(prompt="x" * 1_000_000, raw=True), ROOMY).fits


def test_check_counts_resumed_tokens_whether_or_not_they_fit(
    admission: Admission, host: ModelHost
) -> None:
    message = Check(prompt=ids_of(16), max_tokens=40, resume=resume(host, ids_of(10)))
    fitting = admission.check(message, ROOMY)
    tight = admission.check(message, dataclasses.replace(ROOMY, decode_blocks=2))
    assert (fitting.fits, tight.fits) == (True, False)
    assert tight.blocks == fitting.blocks == 2


# --- sampling --------------------------------------------------------------------------------


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(admission: Admission) -> None:
    """Decoded would index beyond its logits."""
    sampling = Sampling(logit_bias=[LogitBias(id=VOCAB, bias=1.0)])
    error = refusal(admission, Generate(prompt="hi", sampling=sampling))
    assert error.code == "invalid-request"
    assert f"`logit_bias`: token id {VOCAB} is outside the vocabulary of {VOCAB}" in error.message


def test_a_shortest_answer_longer_than_the_default_is_refused(admission: Admission) -> None:
    """`max_tokens` is not named, so only the daemon knows how long an answer may be."""
    error = refusal(admission, Generate(prompt="hi", min_tokens=33))
    assert error.message == "`min_tokens` is 33, but at most 32 fit"


def test_only_a_repetition_penalty_needs_the_prompt_s_tokens(admission: Admission) -> None:
    """They travel in HANDOFF, as a set."""
    ids = [5, 5, 9]
    plain = admission.judge(
        Generate(prompt=ids, sampling=Sampling(presence_penalty=1.0)),  # type: ignore[arg-type]  # lists are invariant
        ROOMY,
    )
    assert plain.prompt_set == b""
    penalised = admission.judge(
        Generate(prompt=ids, sampling=Sampling(repetition_penalty=1.5)),  # type: ignore[arg-type]
        ROOMY,
    )
    assert penalised.prompt_set == pack_tokens(ids, VOCAB)


def test_wishes_reach_the_prompt_as_they_were_asked(admission: Admission) -> None:
    prompt = admission.judge(Generate(prompt="hi", min_tokens=3, logprobs=2), ROOMY)
    assert (prompt.min_tokens, prompt.logprobs) == (3, 2)


# --- the prefix cache ------------------------------------------------------------------------


def test_whole_blocks_are_hashed_resumed_ids_included(host: ModelHost) -> None:
    """On the judge's thread: a long prompt's hashes take some milliseconds."""
    root = root_hash(fingerprint=host.fingerprint, epoch=bytes(16))
    resume = Resume(attempt=1, seed=1, fingerprint=host.fingerprint, ids=ids_of(10))
    prompt = make(host, hash_root=root).judge(Generate(prompt=ids_of(40), resume=resume), ROOMY)
    expected = block_hashes([*ids_of(40), *ids_of(10)], block_size=BLOCK, root=root)
    assert prompt.block_hashes == expected
    assert len(expected) == 3


def test_without_a_prefix_cache_nothing_is_hashed(host: ModelHost) -> None:
    assert make(host).judge(Generate(prompt=ids_of(40)), ROOMY).block_hashes == ()
