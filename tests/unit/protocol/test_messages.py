"""The schemas as a whole: complete, closed, and honest about descriptors."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import msgspec
import pytest

from protocol import messages as m
from tests.unit.protocol.samples import SAMPLES


def test_every_message_has_a_sample() -> None:
    """The tests that run over samples run over everything."""
    assert set(SAMPLES) == set(m.MESSAGE_TYPES.values())


@pytest.mark.parametrize("kind", m.MESSAGE_TYPES.values(), ids=lambda kind: kind.__name__)
def test_messages_are_immutable_and_closed(kind: type[m.Message]) -> None:
    """A message is accepted wholly or changes nothing; nobody edits it afterwards."""
    config = kind.__struct_config__
    assert (config.frozen, config.forbid_unknown_fields, config.tag_field) == (True, True, "type")
    field = next(iter(kind.__struct_fields__), None)
    if field is not None:
        with pytest.raises((AttributeError, FrozenInstanceError), match="immutable"):
            setattr(SAMPLES[kind], field, None)


def test_every_type_is_told_by_its_tag() -> None:
    """The table that decodes tags and the tags themselves agree."""
    for tag, kind in m.MESSAGE_TYPES.items():
        assert msgspec.to_builtins(SAMPLES[kind], builtin_types=(bytes,))["type"] == tag


def test_every_message_may_arrive_somewhere_and_on_few_places() -> None:
    """Eight types have two receivers; a type with more, or none, is a mistake in a union."""
    unions = (m.ToPrefilld, m.ToDecoded, m.FromDaemon, m.LinkToDecoded, m.LinkToPrefilld)
    receivers = {
        tag: sum(kind in union.__args__ for union in unions)
        for tag, kind in m.MESSAGE_TYPES.items()
    }
    assert {tag for tag, count in receivers.items() if count > 1} == {
        "ping",
        "pong",
        "bye",
        "refuse",
        "error",
        "cancel",
        "status-request",
        "metrics-request",
    }


def test_handoff_carries_the_client_and_map_the_pool() -> None:
    """A pool behind a CUDA handle needs no descriptor; its control page still does."""
    on_gpu = msgspec.structs.replace(SAMPLES[m.Map], pool_handle=b"h" * 64)
    assert {kind: n for kind in SAMPLES if (n := m.num_descriptors(SAMPLES[kind]))} == {
        m.Handoff: 1,
        m.Map: 2,
    }
    assert m.num_descriptors(on_gpu) == 1


# --- what single fields cannot say -----------------------------------------------------------


def test_a_token_has_one_bias() -> None:
    """Which of two would count is anybody's guess."""
    entry = m.LogitBias(id=3, bias=1.0)
    with pytest.raises(ValueError, match="`logit_bias` names a token twice"):
        m.Sampling(logit_bias=[entry, m.LogitBias(id=3, bias=2.0)])


def test_the_shortest_answer_is_no_longer_than_the_longest() -> None:
    with pytest.raises(ValueError, match="`min_tokens` is 5, above `max_tokens`, 4"):
        m.Generate(prompt="x", min_tokens=5, max_tokens=4)


def test_every_id_has_its_probability_or_none_has() -> None:
    with pytest.raises(ValueError, match="2 `ids` have 1 `logprobs`"):
        m.Tokens(
            index=0,
            ids=[1, 2],
            text="",
            logprobs=[m.TokenLogprob(logprob=-1.0, top_ids=[], top_logprobs=[])],
        )
