"""Whole runs of every algorithm, and of its pieces that no loss computes, on a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fsm_trainer import AlgorithmSpec, AsyncPolicyTrainer, PolicyOnlyTrainer, register_algorithm
from fsm_trainer.algorithms import registry
from fsm_trainer.algorithms.losses import LossInputs, LossOutput, Normalizers, policy_loss
from fsm_trainer.algorithms.objective import Objective
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.trainers.prepare import prepare
from tests.trainers.helpers import ROWS, metrics_of, varied_reward

Make = Callable[..., TrainConfig]


def run(config: TrainConfig, reward_fn: Callable[[RewardRecord], float] = varied_reward) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run that completed."""
    kind = AsyncPolicyTrainer if config.is_async else PolicyOnlyTrainer
    result = kind(config, reward_fn=reward_fn, dataset=ROWS).fit()
    assert result.outcome == "completed", result.message
    return metrics_of(result.run.path)


@pytest.mark.parametrize("algo", ["grpo", "gspo", "async-cispo", "dr-grpo", "async-dapo"])
def test_every_algorithm_trains(algo: str, make_config: Make) -> None:
    lines = run(make_config(algo=algo, max_steps=3, overlong_buffer_tokens=1, kl_coef=0.01, reference_refresh_steps=2))
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert 0 <= line["effective_sample_size"] <= 1 + 1e-6
        assert line["ratio_min"] <= line["ratio_mean"] <= line["ratio_max"]
        assert 0 <= line["clip_fraction_low"] <= 1 and 0 <= line["clip_fraction_high"] <= 1
        assert line["advantage_abs_mean"] > 0
        assert line["overlong_fraction"] >= 0
        assert line["kl"] >= 0
    assert lines[0]["kl"] == pytest.approx(0.0, abs=1e-6), "the reference is what the run began with"
    assert lines[1]["kl"] > 1e-7, "and stays it after the first step"
    assert lines[2]["kl"] == pytest.approx(0.0, abs=1e-6), "and is the current weights after the second"


@pytest.mark.parametrize(
    "correction", ["token-truncate", "sequence-truncate", "token-mask", "sequence-mask", "decoupled"]
)
def test_every_correction_trains_on_stale_batches(correction: str, make_config: Make) -> None:
    lines = run(make_config(async_admission="lockstep", offpolicy_correction=correction, max_steps=3))
    assert max(line["staleness_max"] for line in lines) == 1
    name = "truncated_fraction" if correction.endswith("truncate") else "masked_fraction"
    assert all(0 <= line[name] <= 1 for line in lines)
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert all(line["clip_fraction_low"] == line["clip_fraction_high"] == 0 for line in lines), "its own ratio is 1"


def test_a_kl_term_makes_a_step_of_a_batch_without_advantages(make_config: Make) -> None:
    lines = run(make_config(algo="grpo", max_steps=2, kl_coef=0.1), lambda record: 0.5)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["zero_variance_fraction"] == 1 for line in lines)


def only_even(record: RewardRecord) -> float:
    """Every other prompt is worth the same whatever is said."""
    return varied_reward(record) if int(record.prompt[2]) % 2 == 0 else 0.5


def test_dynamic_sampling_trains_on_groups_with_spread_only(make_config: Make) -> None:
    config = make_config(algo="grpo", dynamic_sampling="true", oversample_prompts=3, max_steps=4, epochs=10)
    lines = run(config, only_even)
    for line in lines:
        used, idle = line["groups_used_fraction"] * 6, line["zero_variance_fraction"] * 6
        assert used == pytest.approx(min(3, 6 - idle)), "as many as the batch wants, of those that have spread"
    assert any(line["zero_variance_fraction"] > 0 for line in lines)
    assert all(line["advantage_abs_mean"] > 0.1 for line in lines)
    kept = [pq.read_table(file).num_rows for file in sorted(Path(str(config.output_dir)).glob("samples/*.parquet"))]
    assert set(kept) == {6 * config.n_samples}, "what was left out is kept for people"


def test_spare_prompts_are_served_once_an_epoch(make_config: Make) -> None:
    config = make_config(algo="grpo", dynamic_sampling="true", oversample_prompts=2, max_steps=None, epochs=1)
    prepared = prepare(config, reward_fn=varied_reward, dataset=ROWS[:16])
    assert prepared.inputs is not None
    source = prepared.inputs.prompts
    assert source.total_batches == 3, "16 rows in batches of 3 and 2 spare"
    result = PolicyOnlyTrainer(config, prepared=prepared).fit()
    assert result.outcome == "completed", result.message
    assert source.settled == 15, "a group that was left out has had its turn"


def test_a_dataset_too_small_for_the_spare_prompts_is_refused(make_config: Make) -> None:
    config = make_config(dynamic_sampling="true", oversample_prompts=2)
    with pytest.raises(ConfigError, match="--batch-size is 3 and --oversample-prompts 2 but the dataset has 4 rows"):
        prepare(config, reward_fn=varied_reward, dataset=ROWS[:4])


@pytest.fixture
def own_algorithm(monkeypatch: pytest.MonkeyPatch) -> list[Objective]:
    """An algorithm whose loss notes the objective it was asked for."""
    seen: list[Objective] = []

    def loss(inputs: LossInputs, normalizers: Normalizers, objective: Objective) -> LossOutput:
        seen.append(objective)
        return policy_loss(inputs, normalizers, objective)

    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    register_algorithm(AlgorithmSpec("mine", clip_low=0.3, loss=loss))
    return seen


def test_a_registered_algorithm_runs_with_its_own_loss(own_algorithm: list[Objective], make_config: Make) -> None:
    run(make_config(algo="mine", max_steps=2))
    assert {objective.clip_low for objective in own_algorithm} == {0.3}
