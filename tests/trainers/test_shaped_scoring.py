"""Length penalty, dynamic sampling and what a scored batch says of itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from fsm_trainer.algorithms.advantages import mean_centred_advantages
from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.algorithms.shaping import OverlongPenalty
from fsm_trainer.data.prompts import PromptBatch
from fsm_trainer.data.rewards import RewardFn
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.engines.base import Rollout, Sample
from fsm_trainer.trainers.scoring import Scored, Scorer
from fsm_trainer.trainers.scoring_rates import advantage_rates
from tests.trainers.helpers import prompt_batch, rollout

CENTRED = replace(get_algorithm("grpo"), advantage=mean_centred_advantages)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return load_tokenizer(str(model))


def many(tokenizer: Any, digits: list[str], reward_fn: RewardFn, **options: Any) -> Scored:
    """One prompt group for each text of `digits`: each of its digits is one completion."""
    prompts = [tokenizer.encode(f"{i}=") for i in range(len(digits))]
    batch = PromptBatch(
        batch_id=1,
        epoch=0,
        row_indices=tuple(range(len(digits))),
        rows=tuple({"prompt": f"{i}=", "solutions": ["1"]} for i in range(len(digits))),
        prompt_texts=tuple(f"{i}=" for i in range(len(digits))),
        prompt_tokens=tuple(map(tuple, prompts)),
    )
    groups = tuple(tuple(Sample((tokenizer.encode(d)[0], 2), (-0.5, -0.5), "stop") for d in text) for text in digits)
    scorer = Scorer(tokenizer, reward_fn, CENTRED, **options)
    return scorer.score(batch, Rollout(groups, 0, 0), rollout_time_s=0.0, now_s=0.0)


def is_one(record: Any) -> float:
    return float(record.completion == "1")


def prompts_of(scored: Scored, tokenizer: Any) -> list[str]:
    found = [tokenizer.decode(s.tokens[: s.prompt_len]) for s in scored.batch.train_sequences]
    return list(dict.fromkeys(found))


def test_groups_without_spread_make_room_for_spare_ones(tokenizer: Any) -> None:
    scored = many(tokenizer, ["11", "12", "22", "21", "12"], is_one, groups_per_batch=2)
    assert prompts_of(scored, tokenizer) == ["1=", "3="]
    batch = scored.batch
    assert (batch.prompt_count, batch.sequence_count, batch.token_count) == (2, 4, 16)
    assert [s.advantage for s in batch.train_sequences] == [0.5, -0.5, -0.5, 0.5]
    assert batch.reward_mean == mean([1, 1, 1, 0, 0, 0, 0, 1, 1, 0]), "of everything generated: the policy's reward"
    assert not scored.degenerate
    assert len(scored.sequences) == len(scored.completions) == 10, "samples/ keeps what was left out"
    assert scored.rates["zero_variance_fraction"] == (2.0, 5.0)
    assert scored.rates["groups_used_fraction"] == (2.0, 5.0)


def test_a_batch_that_cannot_be_filled_is_smaller_and_warns(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scored = many(tokenizer, ["11", "12", "22"], is_one, groups_per_batch=2)
    assert prompts_of(scored, tokenizer) == ["1="]
    assert scored.rates["groups_used_fraction"] == (1.0, 3.0)
    said = capsys.readouterr()
    (line,) = [line for line in (said.out + said.err).splitlines() if "batch_not_filled" in line]
    assert "informative" in line and "wanted" in line


@pytest.mark.parametrize("digits", [["12", "22", "21"], ["12"]], ids=["filled", "a last batch of one"])
def test_a_batch_that_is_as_full_as_it_can_be_does_not_warn(
    digits: list[str], tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    many(tokenizer, digits, is_one, groups_per_batch=2)
    said = capsys.readouterr()
    assert "batch_not_filled" not in said.out + said.err


def test_the_warning_comes_ever_more_rarely(tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    scorer = Scorer(tokenizer, is_one, CENTRED, groups_per_batch=2)
    for _ in range(9):
        scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)
    said = capsys.readouterr()
    assert (said.out + said.err).count("batch_not_filled") == 4, "at the 1st, 2nd, 4th and 8th"


def test_a_batch_without_any_spread_is_what_it_would_have_been(tokenizer: Any) -> None:
    scored = many(tokenizer, ["11", "22", "11"], is_one, groups_per_batch=2)
    assert scored.degenerate
    assert prompts_of(scored, tokenizer) == ["0=", "1="], "an entropy or KL term may still train on it"
    assert scored.rates["zero_variance_fraction"] == (3.0, 3.0)


def test_without_dynamic_sampling_every_group_is_used(tokenizer: Any) -> None:
    scored = many(tokenizer, ["11", "12"], is_one)
    assert scored.batch.sequence_count == 4
    assert scored.rates["groups_used_fraction"] == (2.0, 2.0)
    assert scored.rates["zero_variance_fraction"] == (1.0, 2.0)


def test_advantages_are_described(tokenizer: Any) -> None:
    rates = advantage_rates(many(tokenizer, ["1222", "11"], is_one).batch.train_sequences)
    # Centred: 0.75 and three times -0.25; two zeros.
    assert rates["advantage_mean"] == (0.0, 6.0)
    assert rates["advantage_abs_mean"] == (1.5, 6.0)
    assert rates["advantage_square_mean"] == (0.75, 6.0)


def test_long_completions_lose_reward_and_advantages_know_it(tokenizer: Any) -> None:
    penalty = OverlongPenalty(longest=4, buffer=2)
    scorer = Scorer(tokenizer, lambda record: 1.0, CENTRED, overlong=penalty)
    scored = scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)
    # Lengths 3, 2, 2 and 4 of 4, the last two of which cost.
    assert [s.reward for s in scored.sequences] == [0.5, 1.0, 1.0, 0.0]
    assert [s.advantage for s in scored.sequences] == [-0.25, 0.25, 0.5, -0.5]
    assert scored.batch.reward_mean == 0.625
    assert scorer.functions == ["<lambda>", "overlong_penalty"]
    assert scored.function_rewards == {"<lambda>": [1.0] * 4, "overlong_penalty": [-0.5, 0.0, 0.0, -1.0]}
    assert scored.rates["overlong_penalty_mean"] == (-1.5, 4.0)
    assert scored.rates["overlong_fraction"] == (2.0, 4.0)


def test_a_masked_sample_stays_masked(tokenizer: Any) -> None:
    def only_short(completions: list[str], **_: Any) -> list[float | None]:
        return [None if len(completion) > 2 else 1.0 for completion in completions]

    scorer = Scorer(tokenizer, only_short, CENTRED, overlong=OverlongPenalty(4, 2))
    scored = scorer.score(prompt_batch(), rollout(), rollout_time_s=0.0, now_s=0.0)
    assert not any(scored.sequences[3].loss_mask)
    assert advantage_rates(scored.batch.train_sequences)["advantage_mean"][1] == 3.0
