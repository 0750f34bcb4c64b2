"""What prefilld says, judged before it is believed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from decoded.admittance import check_chunk, check_handoff, judge_hello
from protocol import messages as wire
from protocol.codec import validate
from protocol.errors import CODES, InvalidMessageError
from protocol.limits import VERSION
from shared.kv.layout import KVLayout
from tests.unit.decoded.samples import CHUNK, EPOCH, HANDOFF, changed

OURS = wire.Instance(boot_id="boot", pid=7, start_time=9, pid_namespace=1, shm_device=2)
THEIRS = wire.Instance(boot_id="boot", pid=8, start_time=9, pid_namespace=1, shm_device=2)
FIELDS: dict[str, str | int | float | bool] = {"kv_dtype": "float32", "model_num_layers": 30}
HELLO = wire.Hello(
    version=VERSION,
    instance=THEIRS,
    epoch=EPOCH,
    backend="memfd",
    device="cpu",
    fingerprint="f",
    fields=FIELDS,
)


def judge(
    uid: int = 5,
    ours: tuple[str, str] = ("memfd", "cpu"),
    **changes: Any,  # noqa: ANN401 - HELLO's fields
) -> wire.Refuse | None:
    hello = msgspec.structs.replace(HELLO, **changes)
    return judge_hello(
        hello,
        instance=OURS,
        uid=uid,
        allowed_uids={5, 0},
        fields=FIELDS,
        backend=ours[0],
        device=ours[1],
    )


def judge_gpu(ours: str = "GPU-a", **changes: Any) -> wire.Refuse | None:  # noqa: ANN401 - as above
    return judge(ours=("cuda", ours), **({"backend": "cuda", "device": "GPU-a"} | changes))


def instance(**changes: Any) -> wire.Instance:  # noqa: ANN401 - INSTANCE's fields
    return msgspec.structs.replace(THEIRS, **changes)


def test_a_prefilld_that_agrees_is_taken() -> None:
    assert judge() is None
    assert judge(uid=0) is None


@pytest.mark.parametrize(
    ("changes", "code", "field", "ours", "theirs"),
    [
        ({"uid": 6}, "credentials", "uid", "0, 5", "6"),
        ({"version": VERSION + 1}, "version", "version", str(VERSION), str(VERSION + 1)),
        ({"instance": instance(boot_id="other")}, "host", "boot_id", "boot", "other"),
        ({"instance": OURS}, "self-connect", "instance", "7", "7"),
        ({"instance": instance(pid=7, pid_namespace=3)}, "same-pid", "pid", "7", "7"),
        ({"backend": "cuda"}, "backend", "backend", "memfd", "cuda"),
        (
            {"fields": FIELDS | {"kv_dtype": "bfloat16"}},
            "fingerprint",
            "kv_dtype",
            "float32",
            "bfloat16",
        ),
        ({"fields": {"kv_dtype": "float32"}}, "fingerprint", "model_num_layers", "30", "absent"),
        ({"fields": FIELDS | {"new": True}}, "fingerprint", "new", "absent", "True"),
    ],
)
def test_a_difference_is_refused_and_named_with_both_values(
    changes: dict[str, Any], code: str, field: str, ours: str, theirs: str
) -> None:
    """Whoever reads it must know what to change, and on which side."""
    refuse = judge(**changes)
    assert refuse is not None
    validate(refuse)
    assert refuse.code in CODES
    assert (refuse.code, refuse.field, refuse.ours, refuse.theirs) == (code, field, ours, theirs)
    assert refuse.message


@pytest.mark.parametrize("ours", ["GPU-a", "GPU-b"])
def test_a_prefilld_on_a_gpu_is_taken(ours: str) -> None:
    """On one or on two; the driver and the proof say the rest."""
    assert judge_gpu(ours) is None


def test_two_pid_namespaces_are_no_reason_while_the_pids_differ() -> None:
    """Memory has been opened across them; only equal pids are taken for the own process."""
    assert judge_gpu(instance=instance(pid_namespace=3)) is None
    refuse = judge_gpu(instance=instance(pid=OURS.pid, pid_namespace=3))
    assert refuse is not None
    assert refuse.code == "same-pid"


@pytest.mark.parametrize(
    ("ours", "changes", "code", "field"),
    [
        ("GPU-a", {"backend": "memfd"}, "backend", "backend"),
        ("GPU-a", {"device": "cpu"}, "invalid-message", "device"),
        ("GPU-a", {"device": "0"}, "invalid-message", "device"),
        ("GPU-a", {"instance": instance(shm_device=9)}, "shm", "shm_device"),
        ("GPU-a", {"instance": instance(shm_device=0)}, "shm", "shm_device"),
        ("MIG-a", {"device": "MIG-b"}, "peer-access", "device"),
        ("GPU-a", {"device": "MIG-b"}, "peer-access", "device"),
    ],
)
def test_what_cuda_cannot_cross_is_refused_before_anything_is_opened(
    ours: str, changes: dict[str, Any], code: str, field: str
) -> None:
    """At the first request it would be a crash or silence."""
    refuse = judge_gpu(ours, **changes)
    assert refuse is not None
    validate(refuse)
    assert (refuse.code, refuse.field) == (code, field)
    assert code in CODES
    assert refuse.message


def test_a_cure_that_does_not_help_on_a_gpu_is_not_told_there() -> None:
    """CUDA's events do not open for another user, whatever is configured."""
    for refuse, is_told in ((judge(uid=6), True), (judge_gpu(uid=6), False)):
        assert refuse is not None
        assert ("link_uid" in refuse.message) is is_told


def test_one_part_of_a_gpu_may_serve_both() -> None:
    assert judge_gpu("MIG-a", device="MIG-a") is None


def test_shared_memory_does_not_need_one_dev_shm() -> None:
    """The memfd travels by itself."""
    assert judge(instance=instance(shm_device=9)) is None


def test_a_user_who_may_not_is_told_nothing_else() -> None:
    """What we run is not everybody's business."""
    refuse = judge(uid=6, version=99, backend="cuda", fields={})
    assert refuse is not None
    assert refuse.code == "credentials"


def test_another_version_is_named_before_what_follows_from_it() -> None:
    refuse = judge(version=99, fields={})
    assert refuse is not None
    assert refuse.code == "version"


# --- each message's numbers ------------------------------------------------------------------

LAYOUT = KVLayout(
    num_blocks=16, num_layers=1, num_kv_heads=1, block_size=16, head_dim=2, dtype="float32"
)
NUM_SLOTS = 4
VOCAB = 100
LOGPROB = wire.TokenLogprob(logprob=-1.0, top_ids=[], top_logprobs=[])


def test_a_chunk_within_the_pool_is_believed() -> None:
    check_chunk(CHUNK, LAYOUT, NUM_SLOTS)
    check_chunk(changed(CHUNK, first=1, blocks=[15], slot=3), LAYOUT, NUM_SLOTS)
    check_chunk(changed(CHUNK, blocks=[]), LAYOUT, NUM_SLOTS)
    check_chunk(changed(CHUNK, event=7), LAYOUT, NUM_SLOTS, num_events=8)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"slot": 4}, "slot 4 is not on a control page of 4"),
        ({"blocks": [3, 16]}, "block 16 is not in a pool of 16 blocks"),
        ({"blocks": [3, 3]}, "a block is named twice"),
        ({"blocks": [1, 2, 3]}, "3 blocks are named of 2 in all"),
        ({"first": 2, "blocks": [3]}, "1 blocks from 2 exceed 2"),
        ({"event": 0}, "event 0 is not in a ring of 0"),
    ],
)
def test_a_chunk_that_contradicts_the_pool_is_refused(changes: dict[str, Any], fault: str) -> None:
    with pytest.raises(InvalidMessageError, match=fault):
        check_chunk(changed(CHUNK, **changes), LAYOUT, NUM_SLOTS)


FIRST_STEP = wire.FirstStep(num_tokens=10, sampling=wire.Sampling(seed=1))
BIASED = [wire.LogitBias(id=3, bias=1.0)]


def test_a_first_step_that_the_chunk_bears_out_is_believed() -> None:
    check_chunk(changed(CHUNK, first_step=FIRST_STEP), LAYOUT, NUM_SLOTS)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_tokens": 17}, "the first step is at 17, but 1 blocks are named"),
        ({"num_tokens": 0}, "the first step is at 0, but 1 blocks are named"),
        ({"sampling": wire.Sampling()}, "the first step's seed is not resolved"),
        ({"sampling": wire.Sampling(seed=1, logit_bias=BIASED)}, "penalties or bias need what"),
        ({"sampling": wire.Sampling(seed=1, repetition_penalty=1.5)}, "penalties or bias need"),
    ],
)
def test_a_first_step_that_nobody_could_take_early_is_refused(
    changes: dict[str, Any], fault: str
) -> None:
    """Taken without what it lacks, it would bring another answer's token."""
    chunk = changed(CHUNK, first_step=changed(FIRST_STEP, **changes))
    with pytest.raises(InvalidMessageError, match=fault):
        check_chunk(chunk, LAYOUT, NUM_SLOTS)


def test_a_first_step_needs_a_place_for_its_token() -> None:
    chunk = changed(CHUNK, total_blocks=1, first_step=changed(FIRST_STEP, num_tokens=16))
    with pytest.raises(InvalidMessageError, match="1 blocks have no room for a token at 16"):
        check_chunk(chunk, LAYOUT, NUM_SLOTS)


def check(**changes: Any) -> None:  # noqa: ANN401 - HANDOFF's fields
    check_handoff(changed(HANDOFF, **changes), LAYOUT, NUM_SLOTS, VOCAB)


def test_a_handoff_that_agrees_with_itself_is_believed() -> None:
    check()
    check(ids=[41, 42, 43], num_tokens=12, resumed=2, delivered=3)
    check(prompt_tokens=17, num_tokens=17, blocks=[1, 2], total_blocks=2, max_tokens=1500)
    check(ids=[VOCAB - 1])
    check(prompt_set=bytes(13), logprobs=2, delivered=0, held_logprobs=[LOGPROB])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"slot": 4}, "slot 4 is not on a control page of 4"),
        ({"blocks": [16]}, "block 16 is not in a pool of 16 blocks"),
        ({"blocks": [3, 3], "total_blocks": 2}, "a block is named twice"),
        ({"blocks": [3, 4]}, "2 blocks are named of 1 in all"),
        ({"blocks": [3, 4], "total_blocks": 2}, "10 tokens do not fill 2 blocks of 16"),
        ({"blocks": []}, "10 tokens do not fill 0 blocks of 16"),
        ({"blocks": [], "num_tokens": 0}, "0 tokens do not fill 0 blocks of 16"),
        ({"ids": []}, "10 prompt tokens and 0 of the answer do not make 10"),
        ({"ids": [1, 2]}, "10 prompt tokens and 2 of the answer do not make 10"),
        ({"num_tokens": 9}, "do not make 9 computed ones"),
        ({"prompt_tokens": 16, "num_tokens": 16}, "1 blocks cannot hold 16 tokens and the next"),
        ({"delivered": 2}, "2 of 1 ids cannot have been delivered"),
        ({"sampling": wire.Sampling()}, "the seed is not resolved"),
        ({"ids": [VOCAB]}, "token id 100 is outside the vocabulary of 100"),
        ({"stop_ids": [VOCAB]}, "token id 100 is outside the vocabulary of 100"),
        (
            {"sampling": wire.Sampling(seed=1, logit_bias=[wire.LogitBias(id=VOCAB, bias=1.0)])},
            "token id 100 is outside the vocabulary of 100",
        ),
        ({"prompt_set": bytes(12)}, "a set of tokens of 12 bytes is not one of a vocabulary of"),
        ({"logprobs": 2, "delivered": 0}, "0 log-probabilities of 1 held ids"),
        ({"held_logprobs": [LOGPROB]}, "1 log-probabilities of 0 held ids"),
    ],
)
def test_a_handoff_that_contradicts_pool_model_or_itself_is_refused(
    changes: dict[str, Any], fault: str
) -> None:
    with pytest.raises(InvalidMessageError, match=fault):
        check(**changes)


def test_a_handoff_of_a_whole_answer_is_refused() -> None:
    """Nothing may be sampled behind its end; decoded would die of an assertion."""
    with pytest.raises(InvalidMessageError, match="6"):
        check(ids=[1, 2, 3, 4, 5, 6], num_tokens=15, max_tokens=6, delivered=6)
