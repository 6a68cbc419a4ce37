"""`--report-to` in whole runs: the trackers get what an export gives, and one that fails fails nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.preflight import check_machine
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.tracking import trackers
from fsm_trainer.tracking.export import export_log
from tests.tracking.readers import read_tensorboard
from tests.trainers.helpers import ROWS, log_of, varied_reward

Make = Callable[..., TrainConfig]


def test_a_run_reports_what_an_export_gives(make_config: Make, tmp_path: Path) -> None:
    result = AsyncPolicyTrainer(make_config(report_to="tensorboard"), reward_fn=varied_reward, dataset=ROWS).fit()
    assert result.outcome == "completed"
    export_log(read_log(result.run.path), "tensorboard", tmp_path / "exported")
    found = read_tensorboard(result.run.path / "tensorboard")
    exported = read_tensorboard(tmp_path / "exported")
    assert {step for step, _ in found} == {1, 2, 3, 4}
    assert {"reward_mean", "loss", "run/interval_s", "run/staleness"} <= {name for _, name in found}
    assert repr(found) == repr({key: exported[key] for key in found})
    # Metrics of the step that ends the run come too late for the log, so for the trackers too.
    assert set(found) == set(exported)


def test_a_tracker_that_fails_fails_nothing(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(info: trackers.RunInfo) -> trackers.Tracker:
        raise ConnectionError("no such host")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", refuse)
    config = make_config(report_to="wandb, tensorboard")
    result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
    assert (result.outcome, result.exit_code) == ("completed", 0)
    (row,) = [r for r in log_of(result.run.path) if r.reason == "tracker_failed/wandb"]
    assert "no such host" in (row.message or "")
    assert read_tensorboard(result.run.path / "tensorboard")


@pytest.mark.parametrize("value", ["mlflow", "wandb,wandb", "none,wandb", "wandb,", ","])
def test_what_no_tracker_is_called_is_refused(value: str, make_config: Make) -> None:
    with pytest.raises(ConfigError, match="expected none, or some of tensorboard, wandb, trackio") as refused:
        make_config(report_to=value)
    assert "--report-to" in str(refused.value)


def test_a_missing_package_is_said_before_the_run(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--report-to trackio needs the package trackio.*fsm-trainer\[trackio\]"):
        check_machine(make_config(report_to="trackio"), 0, frozenset({"dataset_path", "reward_fn_path"}))
