"""Requests and their answers: seeds, tags, and what an answer must hold to become a sample."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fsm_trainer.engines.base import EngineLost, RolloutRequest, Sample, SamplingParams, VersionSpan
from fsm_trainer.engines.vllm_requests import (
    Completion,
    Tags,
    check_filters,
    check_request,
    group_seed,
    logprobs_mode,
    requested,
    sampling_arguments,
    to_group,
    to_rollout,
    to_sample,
)

TAGS = Tags("ab12")
GOOD = Completion([5, 6, 7], [-0.1, -0.2, -0.3], "length", [("ab12-3", 1), ("ab12-4", 2)])


def test_a_tag_is_read_as_it_was_made() -> None:
    assert TAGS.version(TAGS.of(17)) == 17


@pytest.mark.parametrize("tag", [None, "", "default", "cd34-3", "ab12", "ab12-", "ab12-x", "ab12--1"])
def test_a_tag_of_others_is_refused(tag: str | None) -> None:
    with pytest.raises(EngineLost, match="which this run has not loaded into it"):
        TAGS.version(tag)


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        ({}, "processed_logprobs"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "raw_logprobs"),
        ({"top_k": 5}, "raw_logprobs"),
        ({"temperature": 0.0}, "raw_logprobs"),
    ],
)
def test_logprobs_are_asked_for_before_filters(sampling: dict[str, float], mode: str) -> None:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    check_filters(params)
    assert logprobs_mode(params) == mode


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 5}])
def test_filters_go_with_temperature_1_alone(sampling: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="set --temperature 1 or switch them off"):
        check_filters(SamplingParams(temperature=0.5, **sampling))  # type: ignore[arg-type]


def test_sampling_arguments_end_completions_at_the_given_tokens_alone() -> None:
    arguments = sampling_arguments(SamplingParams(n_samples=3, max_new_tokens=9, top_k=4), (2, 5))
    assert {name: arguments[name] for name in ("n", "max_tokens", "top_k", "stop_token_ids", "ignore_eos")} == {
        "n": 3,
        "max_tokens": 9,
        "top_k": 4,
        "stop_token_ids": [2, 5],
        "ignore_eos": True,
    }
    assert requested(SamplingParams(n_samples=3, temperature=0.0)) == 1


def test_seeds_differ_by_run_batch_and_prompt_and_leave_room_for_the_samples() -> None:
    seeds = {
        group_seed(RolloutRequest(batch, (), seed=seed), index)
        for batch in range(8)
        for seed in range(8)
        for index in range(8)
    }
    assert len(seeds) == 512
    # vLLM takes a signed 64-bit seed, and adds a sample's number to it.
    assert max(seeds) + 10**6 < 2**63
    assert min(abs(a - b) for a in seeds for b in seeds if a != b) > 10**6


def test_a_sample_keeps_tokens_logprobs_and_versions() -> None:
    spans = (VersionSpan(3, 1), VersionSpan(4, 2))
    assert to_sample(GOOD, TAGS) == Sample((5, 6, 7), (-0.1, -0.2, -0.3), "length", spans)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (replace(GOOD, finish_reason="abort"), "ended a completion with 'abort' after 3 tokens"),
        (replace(GOOD, finish_reason=None), "ended a completion with None after 3 tokens"),
        (replace(GOOD, spans=[]), "3 tokens, logprobs of 3 and weight versions of 0"),
        (replace(GOOD, spans=[("ab12-3", 2)]), "3 tokens, logprobs of 3 and weight versions of 2"),
        (replace(GOOD, logprobs=[-0.1]), "3 tokens, logprobs of 1 and weight versions of 3"),
        (replace(GOOD, spans=[("ab12-3", 1), ("default", 2)]), "serves weights 'default'"),
    ],
)
def test_a_completion_that_is_not_whole_or_not_ours_loses_the_engine(broken: Completion, said: str) -> None:
    with pytest.raises(EngineLost, match=said):
        to_sample(broken, TAGS)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_logprobs_that_are_not_finite_are_the_weights_fault(value: float) -> None:
    with pytest.raises(FloatingPointError, match="weights of version 4 give logprobs that are not finite"):
        to_sample(replace(GOOD, logprobs=[-0.1, value, -0.3]), TAGS)


def test_a_group_has_as_many_samples_as_were_asked_for() -> None:
    sampling, sample = SamplingParams(n_samples=2, max_new_tokens=3), to_sample(GOOD, TAGS)
    assert to_group([GOOD, GOOD], sampling, TAGS) == [sample, sample]
    assert to_group([GOOD], replace(sampling, temperature=0.0), TAGS) == [sample, sample]
    for found in ([], [GOOD], [GOOD] * 3):
        with pytest.raises(EngineLost, match=rf"returned {len(found)} completions of .*, expected 2 of up to 3"):
            to_group(found, sampling, TAGS)
    with pytest.raises(EngineLost, match="2 completions of up to 3 tokens for a prompt, expected 2 of up to 2"):
        to_group([GOOD, GOOD], replace(sampling, max_new_tokens=2), TAGS)


def test_a_rollout_has_the_oldest_first_and_the_newest_last_version() -> None:
    mixed = to_sample(GOOD, TAGS)
    newer = to_sample(replace(GOOD, spans=[("ab12-4", 3)]), TAGS)
    rollout = to_rollout([[mixed], [newer]])
    assert (rollout.version_first, rollout.version_last) == (3, 4)
    assert rollout.groups == ((mixed,), (newer,))


def test_a_rollout_is_no_younger_than_what_it_began_with() -> None:
    newer = to_sample(replace(GOOD, spans=[("ab12-4", 3)]), TAGS)
    rollout = to_rollout([[newer]], began=3)
    assert (rollout.version_first, rollout.version_last) == (3, 4)
    assert rollout.groups == ((newer,),)
    fresh = to_rollout([[newer]], began=4)
    assert (fresh.version_first, fresh.version_last, fresh.groups[0][0].spans) == (4, 4, ())


def test_samples_of_one_version_carry_no_spans() -> None:
    rollout = to_rollout([[to_sample(replace(GOOD, spans=[("ab12-4", 3)]), TAGS)]])
    assert (rollout.version_first, rollout.version_last) == (4, 4)
    assert rollout.groups[0][0].spans == ()


def test_a_prompt_may_fill_vllm_to_the_last_position() -> None:
    check_request(RolloutRequest(0, ((1,) * 6,), seed=0), longest=10, max_new_tokens=4)
    with pytest.raises(ValueError, match="need 11 positions but vLLM was started for 10"):
        check_request(RolloutRequest(0, ((1,) * 7,), seed=0), longest=10, max_new_tokens=4)
