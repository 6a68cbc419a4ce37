"""From a rollout to a train batch: what the reward function sees, and that everything stays aligned."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.data.reward_contracts import RewardFunction
from fsm_trainer.data.reward_executor import RewardsAborted, ThreadRewards
from fsm_trainer.data.rewards import RewardFn, RewardRecord
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.engines.base import Rollout, Sample
from fsm_trainer.trainers.reward_policy import RewardError, RewardPolicy
from fsm_trainer.trainers.scoring import Scored, Scorer
from tests.trainers.helpers import mixed_rollout, prompt_batch, rollout


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(str(model))


def scored(tokenizer: Any, reward_fn: RewardFn, what: Rollout | None = None) -> Scored:
    scorer = Scorer(tokenizer, reward_fn, get_algorithm("async-grpo"))
    return scorer.score(prompt_batch(), what or rollout(), rollout_time_s=0.5, now_s=9.0)


def test_the_reward_function_sees_each_sample_whole(tokenizer: Any) -> None:
    seen: list[RewardRecord] = []
    scored(tokenizer, lambda record: seen.append(record) or 0.0)  # type: ignore[func-returns-value]
    first, second, third, last = seen
    assert (first.prompt, first.completion, first.rendered_completion) == ("12=", "12", "12<eos>")
    assert (first.answer, first.final_answer, first.source_record["prompt"]) == ("12", "12", "12=")
    assert first.tokens == [5, 6, 14, 5, 6, 2]
    assert first.logprobs == [0.0, 0.0, 0.0, -0.1, -0.2, -0.3]
    assert first.loss_mask == [0, 0, 0, 1, 1, 1]
    assert first.metadata == {
        "batch_id": 7,
        "epoch": 2,
        "group": 0,
        "sample": 0,
        "finish_reason": "stop",
        "policy_version": 3,
    }
    assert (second.completion, second.metadata["sample"], second.metadata["finish_reason"]) == ("55", 1, "length")
    assert (third.prompt, third.completion, third.answer, third.metadata["group"]) == ("4=", "4", "4", 1)
    assert (last.completion, last.tokens) == ("0123", [8, 14, 4, 5, 6, 7])


def test_tokens_logprobs_mask_and_advantages_stay_aligned(tokenizer: Any) -> None:
    rewards = {"12": 1.0, "55": 0.25, "4": 0.5, "0123": -1.0}
    result = scored(tokenizer, lambda record: rewards[record.completion])
    assert result.completions == list(rewards)
    sequences = result.batch.train_sequences
    flat = [(p, s) for p, group in zip(((5, 6, 14), (8, 14)), rollout().groups, strict=True) for s in group]
    for sequence, (prompt, sample), reward in zip(sequences, flat, rewards.values(), strict=True):
        assert sequence.tokens == (*prompt, *sample.tokens)
        assert sequence.logprobs == (*[0.0] * len(prompt), *sample.logprobs)
        assert sequence.loss_mask == (*[0] * len(prompt), *[1] * len(sample.tokens))
        assert (sequence.prompt_len, sequence.reward, sequence.eos_token_id) == (len(prompt), reward, 2)
    for group in ([1.0, 0.25], [0.5, -1.0]):
        expected = [(reward - mean(group)) / (stdev(group) + 1e-4) for reward in group]
        got = [s.advantage for s in sequences if s.reward in group]
        assert got == pytest.approx(expected)
    assert not result.degenerate


def test_the_batch_says_what_it_holds(tokenizer: Any) -> None:
    batch = scored(tokenizer, lambda record: len(record.completion)).batch
    assert (batch.prompt_batch_id, batch.epoch, batch.rollout_policy_version) == (7, 2, 3)
    assert (batch.prompt_count, batch.sequence_count, batch.token_count) == (2, 4, 6 + 5 + 4 + 6)
    assert batch.reward_mean == mean([2, 2, 1, 4])
    assert (batch.rollout_time_s, batch.created_at_s) == (0.5, 9.0)
    assert batch.reward_time_s >= 0 and batch.materialize_time_s >= 0


def test_a_batch_of_mixed_versions_says_who_drew_what(tokenizer: Any) -> None:
    result = scored(tokenizer, lambda record: len(record.completion) / 10, mixed_rollout())
    versions = [((3, 2), (4, 1)), (), (), ((3, 1), (4, 3))]
    assert [s.version_spans for s in result.batch.train_sequences] == versions
    assert result.batch.rollout_policy_version == 3, "the oldest: staleness counts from the first token"


def test_equal_rewards_are_degenerate(tokenizer: Any) -> None:
    result = scored(tokenizer, lambda record: 0.3)
    assert result.degenerate
    assert [s.advantage for s in result.batch.train_sequences] == [0.0] * 4


def test_an_empty_completion_keeps_its_place(tokenizer: Any) -> None:
    groups = rollout().groups
    emptied = Rollout(((groups[0][0], Sample((), (), "length")), groups[1]), 0, 0)
    result = scored(tokenizer, lambda record: float(len(record.completion)), emptied)
    empty = result.batch.train_sequences[1]
    assert (result.completions[1], empty.tokens, empty.loss_mask) == ("", (5, 6, 14), (0, 0, 0))
    assert result.completions[2] == "4"


@pytest.mark.parametrize("bad", [math.nan, math.inf, "1", None])
def test_a_reward_that_is_no_finite_number_is_refused(tokenizer: Any, bad: Any) -> None:
    with pytest.raises(RewardError, match="^ValueError: <lambda> returned .* expected (one|a) finite number"):
        scored(tokenizer, lambda record: bad)


def test_what_the_reward_function_raises_fails_the_batch_with_its_place(tokenizer: Any) -> None:
    def broken(record: RewardRecord) -> float:
        raise KeyError("no such row")

    with pytest.raises(RewardError, match="no such row") as caught:
        scored(tokenizer, broken)
    assert caught.value.type == "KeyError"
    assert caught.value.where.startswith("broken, test_scoring.py:")
    assert "raise KeyError" in caught.value.traceback


def test_abort_ends_scoring_before_the_next_sample(tokenizer: Any) -> None:
    inside, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def slow(record: RewardRecord) -> float:
        calls.append(record.completion)
        inside.set()
        assert go_on.wait(30)
        return 0.0

    scorer = Scorer(tokenizer, slow, get_algorithm("grpo"))
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(scorer.score, prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)
        assert inside.wait(30)
        scorer.abort()
        go_on.set()
        with pytest.raises(RewardsAborted):
            future.result(30)
    assert calls == ["12"]
    with pytest.raises(RewardsAborted):
        scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)


def test_the_hand_made_prompts_are_what_the_tokenizer_gives(tokenizer: Any) -> None:
    assert [tokenizer.encode(text) for text in prompt_batch().prompt_texts] == [[5, 6, 14], [8, 14]]


def of_two(tokenizer: Any, on_error: str, *functions: RewardFn) -> Scored:
    rewards = ThreadRewards([RewardFunction.of(function) for function in functions])
    policy = RewardPolicy([1.0, 0.5][: len(functions)], on_error)  # type: ignore[arg-type]
    scorer = Scorer(tokenizer, rewards, get_algorithm("grpo"), policy=policy)
    return scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)


def length(record: RewardRecord) -> float:
    return float(len(record.completion))


def first_is_not_mine(completions: list[str], **_: Any) -> list[float | None]:
    return [None if completion == "12" else 1.0 for completion in completions]


def fails_on_55(record: RewardRecord) -> float:
    if record.completion == "55":
        raise KeyError("55")
    return float(len(record.completion))


def test_several_functions_are_summed_by_weight_over_those_that_apply(tokenizer: Any) -> None:
    result = of_two(tokenizer, "fail", length, first_is_not_mine)
    assert [s.reward for s in result.batch.train_sequences] == [2.0, 2.5, 1.5, 4.5]
    assert result.function_rewards == {"length": [2, 2, 1, 4], "first_is_not_mine": [None, 1, 1, 1]}
    assert result.rates["reward/length"] == (9.0, 4.0)
    assert result.rates["reward/first_is_not_mine"] == (3.0, 3.0)
    assert result.reward_metrics["reward_unscorable"] == 0


def test_what_no_function_can_score_is_masked_and_counted(tokenizer: Any) -> None:
    result = of_two(tokenizer, "fail", first_is_not_mine)
    first, second, third, _ = result.batch.train_sequences
    assert math.isnan(first.reward)
    assert (first.advantage, set(first.loss_mask), set(third.loss_mask)) == (0.0, {0}, {0, 1})
    assert (second.reward, second.advantage) == (1.0, 0.0)
    assert result.batch.reward_mean == 1.0
    assert result.reward_metrics == {"reward_errors": 0, "reward_timeouts": 0, "reward_unscorable": 1}


@pytest.mark.parametrize(
    ("on_error", "rewards", "advantage"),
    [("zero", [2.0, 0.0, 1.0, 4.0], 2**-0.5), ("mask", [2.0, None, 1.0, 4.0], 0.0)],
)
def test_a_failed_sample_becomes_what_the_policy_says(
    tokenizer: Any, on_error: str, rewards: list[float | None], advantage: float
) -> None:
    result = of_two(tokenizer, on_error, fails_on_55)
    got = [None if math.isnan(s.reward) else s.reward for s in result.batch.train_sequences]
    assert got == rewards
    assert result.batch.train_sequences[0].advantage == pytest.approx(advantage, rel=1e-3)
    assert result.reward_metrics["reward_errors"] == 1
    assert result.message is not None
    assert result.message.startswith("fails_on_55 failed for 1 of 4 samples: KeyError: '55' (test_scoring.py:")
