"""What vLLM draws, and the logprobs it says it drew it with, held against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from fsm_trainer.engines.base import EngineLost, RolloutRequest
from tests.vllm.conftest import MAX_MODEL_LEN, Engine, Publish, largest_gap, reference

PROMPTS = ((4, 5, 6, 7, 14), (8, 9, 14), (10,), (11, 12, 13, 4, 5, 6, 7, 8, 14))
TOLERANCE = 1e-4


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7}, {"temperature": 1.3}, {"top_p": 0.6}, {"top_k": 4}, {"temperature": 0.0}]
)
def test_logprobs_are_those_of_the_policy(
    engine: Engine, publish: Publish, models: list[PreTrainedModel], sampling: dict[str, Any]
) -> None:
    rollouts = engine(n_samples=3, max_new_tokens=20, **sampling)
    rollouts.load_weights(publish(1))
    rollout = rollouts.generate(RolloutRequest(0, PROMPTS, seed=3))
    assert (rollout.version_first, rollout.version_last) == (1, 1)
    assert largest_gap(models, PROMPTS, rollout, sampling.get("temperature") or 1.0) < TOLERANCE


def test_greedy_tokens_are_the_likeliest(engine: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollouts = engine(n_samples=1, max_new_tokens=12, temperature=0.0, eos=())
    rollouts.load_weights(publish(0))
    rollout = rollouts.generate(RolloutRequest(0, PROMPTS, seed=0))
    for prompt, (sample,) in zip(PROMPTS, rollout.groups, strict=True):
        with torch.no_grad():
            logits = models[0](torch.tensor([[*prompt, *sample.tokens]])).logits[0, len(prompt) - 1 : -1]
        assert list(sample.tokens) == logits.argmax(-1).tolist()


def test_a_filter_leaves_only_the_likeliest_tokens(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    rollouts = engine(n_samples=4, max_new_tokens=10, top_k=2, eos=())
    rollouts.load_weights(publish(0))
    rollout = rollouts.generate(RolloutRequest(0, PROMPTS, seed=1))
    for prompt, group in zip(PROMPTS, rollout.groups, strict=True):
        for sample in group:
            with torch.no_grad():
                logits = models[0](torch.tensor([[*prompt, *sample.tokens]])).logits[0, len(prompt) - 1 : -1]
            best = logits.topk(2).indices.tolist()
            assert all(token in two for token, two in zip(sample.tokens, best, strict=True))


def test_frequencies_are_the_policys(engine: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    n = 2000
    rollouts = engine(n_samples=n, max_new_tokens=1, eos=())
    rollouts.load_weights(publish(0))
    (group,) = rollouts.generate(RolloutRequest(0, PROMPTS[:1], seed=5)).groups
    drawn = torch.bincount(torch.tensor([s.tokens[0] for s in group]), minlength=32).double() / n
    with torch.no_grad():
        policy = models[0](torch.tensor([PROMPTS[0]])).logits[0, -1].double().softmax(-1)
    # Five standard deviations of the likeliest token's count.
    assert float((drawn - policy).abs().max()) < 5 * float((policy.max() / n).sqrt())


def test_stop_tokens_end_a_completion_and_are_part_of_it(engine: Engine, publish: Publish) -> None:
    ends = (2, 5, 9, 17)
    rollouts = engine(n_samples=16, max_new_tokens=8, eos=ends)
    rollouts.load_weights(publish(0))
    rollout = rollouts.generate(RolloutRequest(0, PROMPTS, seed=0))
    samples = [sample for group in rollout.groups for sample in group]
    assert {sample.finish_reason for sample in samples} == {"stop", "length"}
    for sample in samples:
        assert not set(ends) & set(sample.tokens[:-1])
        if sample.finish_reason == "stop":
            assert sample.tokens[-1] in ends
        else:
            assert len(sample.tokens) == 8


def test_every_sample_has_its_own_seed(engine: Engine, publish: Publish) -> None:
    rollouts = engine(n_samples=8, max_new_tokens=16, eos=())
    rollouts.load_weights(publish(0))
    request = RolloutRequest(7, (PROMPTS[0], PROMPTS[0]), seed=0)
    first = rollouts.generate(request)
    assert len({sample.tokens for group in first.groups for sample in group}) == 16
    assert rollouts.generate(request) == first
    assert rollouts.generate(replace(request, batch_id=8)).groups != first.groups


def test_scores_are_transformers_logprobs(engine: Engine, publish: Publish, models: list[PreTrainedModel]) -> None:
    rollouts = engine(n_samples=1, max_new_tokens=4)
    rollouts.load_weights(publish(1))
    sequences: Sequence[Sequence[int]] = [PROMPTS[0], PROMPTS[3], [4] * 40]
    scores = rollouts.score(sequences, 1.0)
    assert scores is not None
    for tokens, found in zip(sequences, scores, strict=True):
        assert found == pytest.approx(reference(models[1], tokens[:1], tokens[1:]), abs=TOLERANCE)
    assert rollouts.score(sequences, 0.7) is None
    assert rollouts.score([[4] * (MAX_MODEL_LEN + 1)], 1.0) is None


def test_a_prompt_that_is_too_long_is_refused_with_what_to_do(engine: Engine, publish: Publish) -> None:
    rollouts = engine(n_samples=1, max_new_tokens=MAX_MODEL_LEN)
    rollouts.load_weights(publish(0))
    with pytest.raises(ValueError, match="prompt 0 of 5 tokens.*lower max_new_tokens"):
        rollouts.generate(RolloutRequest(0, PROMPTS[:1], seed=0))


def test_weights_of_somebody_else_are_not_taken_for_ones_own(engine: Engine, publish: Publish) -> None:
    mine, other = engine(n_samples=1, max_new_tokens=2), engine(n_samples=1, max_new_tokens=2)
    mine.load_weights(publish(0))
    other.load_weights(publish(0))
    with pytest.raises(EngineLost, match="not loaded into it"):
        mine.generate(RolloutRequest(0, PROMPTS, seed=0))


def test_more_prompt_tokens_than_one_step_takes(
    engine: Engine, publish: Publish, models: list[PreTrainedModel]
) -> None:
    """They go into several steps, each prompt whole: vLLM's CPU build dies of half a prompt with a seed."""
    prompts = tuple(tuple(4 + (index + place) % 28 for place in range(200)) for index in range(64))
    rollouts = engine(n_samples=1, max_new_tokens=4)
    rollouts.load_weights(publish(0))
    rollout = rollouts.generate(RolloutRequest(0, prompts, seed=0))
    assert largest_gap(models, prompts, rollout) < TOLERANCE
