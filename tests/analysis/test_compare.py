"""Figures and settings of two runs side by side, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fsm_trainer.analysis.compare import compare_figures, compare_settings, final_reward, settings
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import write_log
from tests.replay.virtual_run import log_of, virtual_run


def log_with_rewards(folder: Path, rewards: list[float]) -> EventLog:
    rows = [Record(0, 5, RecordKind.INPUT, trigger="begin")]
    for version, value in enumerate(rewards, 1):
        row = Record(version, 5 + version, RecordKind.METRIC, machine="trainer", train_version=version, value=value)
        rows.append(row._replace(reason="reward_mean"))
    return read_log(log_of(folder, rows, SchedulerConfig()))


@pytest.mark.parametrize("count", [1, 9, 10, 37, 100])
def test_final_reward_is_that_of_the_last_tenth(tmp_path: Path, count: int) -> None:
    values = [float(v) for v in np.random.default_rng(count).normal(size=count)]
    last = values[-max(1, round(count / 10)) :]
    assert final_reward(log_with_rewards(tmp_path, values)) == pytest.approx(sum(last) / len(last))


def test_final_reward_without_one(tmp_path: Path) -> None:
    assert final_reward(log_with_rewards(tmp_path / "a", [])) is None
    assert final_reward(log_with_rewards(tmp_path / "b", [1.0, 3.0, float("nan")])) == 3.0


def test_figures_of_two_runs(tmp_path: Path) -> None:
    """By hand in test_summary.py: the synchronous run of 20 steps takes 3.536 s."""
    one, other = SchedulerConfig(max_steps=20, max_staleness=0), SchedulerConfig(max_steps=20)
    logs = [read_log(log_of(tmp_path / str(i), virtual_run(c), c)) for i, c in enumerate((one, other))]
    found = compare_figures(logs[0], logs[1])
    assert found["wall time (s)"][0] == pytest.approx(3.536)
    assert found["wall time (s)"][1] < 3.0
    assert found["optimiser steps"] == (20, 20)
    assert found["bound by"][0] == "generation"
    assert found["mean staleness of trained batches"] == (0.0, 19 / 20)
    assert found["train (s a step)"] == (pytest.approx(0.06), pytest.approx(0.06))


def test_settings_that_differ(tmp_path: Path) -> None:
    logs = []
    for name, run in (("a", {"lr": 1e-6, "tags": ["x"]}), ("b", {"lr": 2e-6, "tags": ["x"], "seed": 3})):
        path = tmp_path / name
        path.mkdir()
        config = SchedulerConfig(queue_size=2 if name == "a" else 3)
        write_log(path / LOG_NAME, [], log_metadata(config, run))
        logs.append(read_log(path))
    assert compare_settings(logs[0], logs[1]) == {
        "run.lr": (1e-6, 2e-6),
        "run.seed": (None, 3),
        "scheduler.queue_size": (2, 3),
    }
    assert settings(logs[0])["scheduler.deadlines.train_s"] == 1800.0
    assert compare_settings(logs[0], logs[0]) == {}
