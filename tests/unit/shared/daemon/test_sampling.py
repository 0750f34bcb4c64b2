"""The wire's words for sampling, and the engine's."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from protocol.messages import LogitBias, Sampling, TokenLogprob
from shared.daemon.sampling import sampling_params, wire_logprob
from shared.ops import logprobs
from shared.ops.sampling import SamplingParams


def test_sampling_goes_to_the_engine_as_it_came() -> None:
    sampling = Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=9,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=[LogitBias(id=4, bias=-3.5)],
    )
    params = sampling_params(sampling, min_tokens=5, end_ids=[2, 7])
    assert params == SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        seed=9,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((4, -3.5),),
        min_tokens=5,
        end_ids=(2, 7),
    )


def test_no_field_of_the_wire_is_forgotten() -> None:
    """A field that the engine never sees would be taken from clients in silence."""
    wire = {field.name for field in msgspec.structs.fields(Sampling)}
    engine = {field.name for field in dataclasses.fields(SamplingParams)}
    assert wire == engine - {"min_tokens", "end_ids"}


def test_defaults_are_the_same_on_both_sides() -> None:
    assert sampling_params(Sampling(seed=0)) == SamplingParams()


def test_an_unresolved_seed_never_reaches_the_engine() -> None:
    """Two daemons that each drew one would continue each other's answer wrongly."""
    with pytest.raises(ValueError, match="the seed was not resolved"):
        sampling_params(Sampling())


def test_probabilities_go_to_the_wire_as_they_came() -> None:
    told = wire_logprob(logprobs.TokenLogprob(-0.5, ((3, -0.25), (1, -2.0))))
    assert told == TokenLogprob(logprob=-0.5, top_ids=[3, 1], top_logprobs=[-0.25, -2.0])
