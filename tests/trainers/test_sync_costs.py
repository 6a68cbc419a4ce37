"""What a load of weights cost, from the engine to the log, the frame and the summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer import AsyncPolicyTrainer
from fsm_trainer.analysis import steps_frame, sync_frame
from fsm_trainer.analysis.summary import summarize
from fsm_trainer.analysis.summary_text import render
from fsm_trainer.cli.replay import main
from fsm_trainer.config import TrainConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.engines.base import Loaded
from fsm_trainer.replay.verify import verify
from fsm_trainer.trainers.sync_costs import SyncCosts
from tests.trainers.helpers import ROWS, log_of, varied_reward


def load_of(engine: int, version: int, trigger: str = "load") -> Record:
    return Record(9, 70, RecordKind.VERSION, trigger=trigger, engine=engine, rollout_version_last=version)


def test_each_load_leaves_what_its_engine_said() -> None:
    costs = SyncCosts()
    costs.note(0, Loaded(4, nbytes=1000, pause_s=0.25, transfer_s=0.5, resume_s=0.125))
    costs.note(1, Loaded(5, transfer_s=0.75))
    rows = costs.rows([load_of(0, 4), load_of(0, 4, "step"), load_of(2, 4), load_of(1, 5)])
    assert [(row.engine, row.rollout_version_last, row.reason, row.value) for row in rows] == [
        (0, 4, "sync_pause_s", 0.25),
        (0, 4, "sync_transfer_s", 0.5),
        (0, 4, "sync_resume_s", 0.125),
        (0, 4, "sync_bytes", 1000.0),
        (1, 5, "sync_transfer_s", 0.75),
    ]
    assert {(row.kind, row.machine, row.t_ns, row.cause_seq, row.train_version) for row in rows} == {
        (RecordKind.METRIC, "engine", 70, 9, None)
    }
    costs.note(0, Loaded(6))
    assert costs.rows([load_of(0, 6)]) == [], "an engine that says nothing leaves nothing, not the load before"


def test_a_run_logs_its_loads(make_config: Callable[..., TrainConfig], capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(max_steps=3, async_max_staleness=0)  # so that the engine skips no version
    result = AsyncPolicyTrainer(config, reward_fn=varied_reward, dataset=ROWS).fit()
    assert result.exit_code == 0, result.message
    path: Path = result.run.path
    rows = [row for row in log_of(path) if row.reason == "sync_bytes"]
    assert [row.rollout_version_last for row in rows] == [0, 1, 2]
    loads = sync_frame(path).query("loaded")
    assert loads["version"].tolist() == [0, 1, 2]
    assert loads["nbytes"].tolist() == [row.value for row in rows]
    assert (loads["transfer_s"] > 0).all()
    assert (loads["transfer_s"] < loads["load_s"]).all(), "a part of the load"
    assert loads["pause_s"].isna().all(), "this engine runs nothing while it loads"
    assert not {"sync_bytes", "probe_gap"} & {*steps_frame(path).columns}, "no numbers of a step"
    assert verify(path).ok
    found = summarize(path).syncs
    assert found is not None
    speed = loads["nbytes"].sum() / loads["transfer_s"].sum()
    assert (found.loads, found.nbytes, found.pause_s, found.resume_s) == (3, rows[0].value, None, None)
    assert found.bytes_per_s == pytest.approx(speed)
    assert (
        f"weight syncs      3 loads, each {rows[0].value / 1e6:.3g} MB at {speed / 1e9:.3g} GB/s, transfer "
        in render(summarize(path))
    )
    capsys.readouterr()
    assert main(["summary", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["syncs"]["nbytes"] == rows[0].value
