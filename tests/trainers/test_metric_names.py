"""The list of metrics holds for the page and for real runs, and every rate is its numerator over its denominator."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.data.rewards import RewardRecord
from fsm_trainer.simulate.recorded import SCORING
from fsm_trainer.trainers.metric_names import BY_NAME, METRICS, PAGE, find, with_table
from fsm_trainer.trainers.rollout_operations import SCORING_CPU
from tests.trainers.helpers import ROWS, log_of, metrics_of, varied_reward

Make = Callable[..., TrainConfig]
HEAD = {"step", "train_version", "rollout_version", "batch_id", "epoch", "time_s"}


def test_names_are_unique_and_the_page_is_current() -> None:
    assert len(BY_NAME) == len(METRICS)
    page = (Path(__file__).parents[2] / PAGE).read_text()
    assert with_table(page) == page, "run `make docs`"


def test_what_if_reads_the_metric_that_runs_write() -> None:
    assert SCORING in BY_NAME
    assert SCORING == SCORING_CPU


def second_reward(record: RewardRecord) -> float:
    return float(record.tokens[-1] % 3)


def metric_rows(make_config: Make, **settings: Any) -> list[Record]:
    """The metric rows of a real run, all of them with what the list says they have."""
    config = make_config(**settings)
    result = AsyncPolicyTrainer(config, reward_fn=[varied_reward, second_reward], dataset=ROWS).fit()
    assert result.exit_code == 0, result.message
    rows = [row for row in log_of(result.run.path) if row.kind is RecordKind.METRIC]
    for row in rows:
        metric = find(str(row.reason))
        assert metric is not None, f"{row.reason} is not in the list"
        assert (row.numerator is None, row.denominator is None) == (metric.numerator is None,) * 2, row
        assert row.value is not None and math.isfinite(row.value), row
        if row.numerator is not None and row.denominator is not None:
            assert row.value == pytest.approx(row.numerator / row.denominator), row
    for line in metrics_of(result.run.path):
        of_step = {row.reason: row.value for row in rows if row.train_version == line["step"]}
        assert {name: value for name, value in line.items() if name not in HEAD} == of_step
    return rows


def test_a_real_run_leaves_every_metric(make_config: Make) -> None:
    # In lockstep every batch but the first is stale, and the engine loads every version.
    first = metric_rows(make_config, async_admission="lockstep", kl_coef=0.1, offpolicy_correction="token-truncate")
    names = {str(row.reason) for row in first}
    assert {"reward/varied_reward", "reward/second_reward"} <= names
    # Those that only other settings give, or only a GPU.
    lacking = {"reward/NAME", "masked_fraction", "overlong_penalty_mean", "overlong_fraction", "mfu"}
    lacking |= {"span_truncated_fraction", "sync_pause_s", "sync_resume_s"}
    assert set(BY_NAME) - names == lacking
    of_steps = [row for row in first if row.train_version is not None]
    assert {row.staleness for row in of_steps} == {0, 1}
    gaps = {row.staleness: row.value for row in of_steps if row.reason == "logprob_gap_max"}
    assert gaps[0] < 1e-5 < 1e-3 < gaps[1], "weights that are a step apart differ"
    loads = [row for row in first if row.reason == "probe_gap"]
    assert [(row.engine, row.rollout_version_last) for row in loads] == [(0, version) for version in range(3)]
    assert all(row.denominator == 12 for row in loads), "4 prompts of 4 tokens, the first of which has no score"


def test_other_settings_leave_the_rest(make_config: Make) -> None:
    rows = metric_rows(
        make_config,
        offpolicy_correction="token-mask",
        async_span_policy="correct",
        overlong_buffer_tokens=2,
        max_steps=2,
        sync_probe_prompts=0,
    )
    names = {str(row.reason) for row in rows}
    assert {"masked_fraction", "span_truncated_fraction", "overlong_penalty_mean", "overlong_fraction"} <= names
    assert names.isdisjoint({"probe_gap", "kl", "truncated_fraction"})
