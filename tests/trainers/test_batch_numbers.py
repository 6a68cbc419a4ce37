"""What a step says about its batch, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fsm_trainer.engines.base import TrainResult
from fsm_trainer.engines.logprob_gap import LogprobGap
from fsm_trainer.trainers.batch_numbers import batch_rates, batch_values, quotient
from fsm_trainer.trainers.operations import BatchWork
from tests.trainers.helpers import rollout, sequence, train_batch


def work(**changes: object) -> BatchWork:
    """Three sequences: advantages 1, -1 and 3; completions of 2, 2 and 4 tokens after prompts of 3, 3 and 1."""
    long = replace(sequence(advantage=3.0), prompt_len=1, loss_mask=(0, 1, 1, 1, 1), logprobs=(0.0, *(-3.4,) * 4))
    sequences = (sequence(advantage=1.0), sequence(advantage=-1.0), long)
    batch = train_batch(0, 0, train_sequences=sequences, token_count=15, reward_mean=1.0)
    result = TrainResult(True, 1, {"tokens_per_s": 30.0, "mfu": 0.25}, {"ratio_mean": (9.0, 8.0)})
    return replace(BatchWork(train_batch=batch, result=result), **changes)  # type: ignore[arg-type]


def test_rates_of_a_producers_batch() -> None:
    rates = batch_rates(work())
    assert rates["reward_mean"] == (3.0, 3.0)
    assert rates["advantage_mean"] == (3.0, 3.0)
    assert rates["advantage_square_mean"] == (11.0, 3.0)
    assert rates["prompt_tokens_mean"] == (7.0, 3.0)
    assert rates["completion_tokens_mean"] == (8.0, 3.0)
    assert rates["ratio_mean"] == (9.0, 8.0)
    assert rates["tokens_per_s"] == (15.0, 0.5), "15 tokens at 30 a second"
    assert rates["mfu"] == (0.125, 0.5)
    assert rates.keys().isdisjoint({"completion_truncated_fraction", "rollout_tokens_per_s", "rescore_gap"})


def test_rates_of_what_was_generated_here() -> None:
    made = work(
        rollout=rollout(), rollout_s=2.0, rescored=LogprobGap(4, 0.5, -0.5, 0.25), rates={"reward_mean": (5.0, 4.0)}
    )
    rates = batch_rates(made)
    assert rates["completion_truncated_fraction"] == (2.0, 4.0)
    assert rates["rollout_tokens_per_s"] == (11.0, 2.0)
    assert rates["rescore_gap"] == (0.5, 4.0)
    assert rates["reward_mean"] == (5.0, 4.0), "also of samples that are not trained on"
    assert batch_values(made, rates)["rescore_gap_max"] == 0.25


def test_old_tokens_of_samples_of_mixed_versions() -> None:
    made = work()
    assert made.train_batch is not None
    assert batch_rates(made)["span_old_fraction"] == (0.0, 8.0)
    first, second, long = made.train_batch.train_sequences
    mixed = (
        replace(first, version_spans=((3, 1), (4, 1))),
        second,
        replace(long, version_spans=((2, 1), (3, 1), (4, 2))),
    )
    batch = replace(made.train_batch, train_sequences=mixed)
    assert batch_rates(work(train_batch=batch))["span_old_fraction"] == (3.0, 8.0)


def test_values() -> None:
    made = work()
    values = batch_values(made, batch_rates(made))
    assert values == {
        "advantage_min": -1.0,
        "advantage_max": 3.0,
        "advantage_std": pytest.approx(math.sqrt(8 / 3)),
        "completion_tokens_min": 2.0,
        "completion_tokens_max": 4.0,
    }


def test_a_batch_without_rewards_has_a_mean_that_is_no_number() -> None:
    masked = tuple(replace(sequence(), reward=math.nan, loss_mask=(0,) * 5) for _ in range(2))
    made = BatchWork(
        train_batch=train_batch(0, 0, train_sequences=masked, reward_mean=math.nan), result=TrainResult(True, 1)
    )
    rates = batch_rates(made)
    assert math.isnan(quotient(rates["reward_mean"]))
    assert batch_values(made, rates) == {}
