"""metrics.jsonl from hand-made records: every number against one worked out on paper."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsm_trainer.core.events import InputKind, Record, RecordKind
from fsm_trainer.engines.base import TrainResult
from fsm_trainer.trainers.metrics import StepMetrics
from fsm_trainer.trainers.operations import BatchWork
from tests.trainers.helpers import DOCUMENTED, metrics_of, train_batch

MS = 1_000_000
TRAINED = {"loss": 0.5, "grad_norm": 2.0, "ratio_mean": 1.25, "tokens": 999.0}


def move(t_ms: int, machine: str, source: str, dest: str, trigger: str = "x") -> Record:
    entity = f"{machine}-0" if machine in ("engine", "rollout") else machine
    return Record(0, t_ms * MS, RecordKind.TRANSITION, machine, entity, trigger, source, dest)


def done(t_ms: int, kind: InputKind, started_ms: int, finished_ms: int) -> Record:
    times = {"started_ns": started_ms * MS, "finished_ns": finished_ms * MS}
    return Record(0, t_ms * MS, RecordKind.INPUT, trigger=kind.value, **times)


def step(t_ms: int, version: int, batch_id: int) -> Record:
    version_row = Record(8, t_ms * MS, RecordKind.VERSION, "trainer", "trainer", "step", batch_id=batch_id)
    return version_row._replace(train_version=version)


class Stage:
    """A StepMetrics with hand-made batches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work: dict[int, BatchWork] = {}
        self.metrics = StepMetrics(folder / "metrics.jsonl", self.work.get)

    def batch(self, batch_id: int, version: int, metrics: dict[str, float] | None = None) -> None:
        result = TrainResult(True, 1, TRAINED if metrics is None else metrics)
        self.work[batch_id] = BatchWork(train_batch=train_batch(batch_id, version), result=result)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    stage.metrics.close()


def test_one_line_has_every_documented_number(stage: Stage) -> None:
    stage.batch(4, version=5)
    stage.metrics.on_step([Record(0, 0, RecordKind.QUEUE, "queue", queue_len=2)])
    stage.metrics.on_step([done(1000, InputKind.TRAINED, 400, 900), step(1000, 8, 4)])
    (line,) = metrics_of(stage.folder)
    assert set(DOCUMENTED) <= set(line)
    assert (line["step"], line["train_version"], line["rollout_version"]) == (8, 8, 5)
    assert (line["batch_id"], line["epoch"], line["time_s"]) == (4, 0, 1.0)
    assert (line["reward_mean"], line["loss"], line["grad_norm"], line["ratio_mean"]) == (0.5, 0.5, 2.0, 1.25)
    assert (line["staleness_mean"], line["staleness_max"]) == (2, 2), "7 steps were taken when it was consumed"
    assert (line["rollout_s"], line["reward_s"], line["materialize_s"]) == (0.25, 0.125, 0.0625)
    assert line["train_s"] == 0.5
    assert line["queue_len"] == 2
    assert line["tokens"] == 10, "prompt and completion tokens of the batch, not those in the loss"


def test_wait_and_sync_are_those_since_the_step_before(stage: Stage) -> None:
    stage.batch(0, version=0)
    stage.batch(1, version=0)
    before_first = [
        move(0, "trainer", "waiting", "syncing"),
        done(30, InputKind.EXPORTED, 10, 30),  # 20 ms of sync
        move(30, "trainer", "syncing", "waiting"),
        move(30, "engine", "starting", "loading"),
        move(70, "engine", "loading", "open"),  # 40 ms of sync
        move(70, "run", "starting", "running", "run"),
        move(200, "trainer", "waiting", "checking"),  # 130 ms of waiting: since the run was up
        move(200, "trainer", "checking", "training"),
    ]
    for record in before_first:
        stage.metrics.on_step([record])
    stage.metrics.on_step([done(300, InputKind.TRAINED, 210, 290), step(300, 1, 0)])
    after_first = [
        move(300, "trainer", "training", "syncing"),
        move(300, "engine", "open", "draining"),
        done(310, InputKind.EXPORTED, 302, 309),  # 7
        move(310, "trainer", "syncing", "waiting"),
        move(350, "trainer", "waiting", "checking"),  # 40
        move(350, "trainer", "checking", "waiting"),  # dropped
        move(360, "engine", "draining", "loading"),
        move(363, "engine", "loading", "open"),  # 3
        move(375, "trainer", "waiting", "checking"),  # 25
        move(375, "trainer", "checking", "training"),
        move(380, "rollout", "idle", "loading"),
        move(390, "rollout", "loading", "ready"),  # loading prompts is no sync
    ]
    stage.metrics.on_step(after_first)
    stage.metrics.on_step([done(500, InputKind.TRAINED, 380, 480), step(500, 2, 1)])
    first, second = metrics_of(stage.folder)
    assert (first["wait_s"], first["sync_s"], first["train_s"]) == pytest.approx((0.130, 0.060, 0.080))
    assert (second["wait_s"], second["sync_s"], second["train_s"]) == pytest.approx((0.065, 0.010, 0.100))


def test_the_same_numbers_go_to_the_log(stage: Stage) -> None:
    stage.batch(4, version=5)
    rows = stage.metrics.on_step([done(1000, InputKind.TRAINED, 400, 900), step(1000, 8, 4)])
    (line,) = metrics_of(stage.folder)
    assert {row.reason: row.value for row in rows}.items() <= line.items()
    assert {row.reason for row in rows} >= set(DOCUMENTED) - {"step", "train_version"}
    for row in rows:
        assert (row.seq, row.kind, row.train_version, row.batch_id, row.cause_seq) == (-1, RecordKind.METRIC, 8, 4, 8)


def test_a_line_is_on_disk_at_once_and_is_the_newest_for_a_display(stage: Stage) -> None:
    assert stage.metrics.last == {}
    stage.batch(0, version=0)
    stage.metrics.on_step([done(1, InputKind.TRAINED, 0, 1), step(1, 1, 0)])
    assert json.loads((stage.folder / "metrics.jsonl").read_text())["step"] == 1
    assert stage.metrics.last["loss"] == 0.5


def test_what_is_no_step_writes_nothing(stage: Stage) -> None:
    load = Record(0, 5, RecordKind.VERSION, "engine", "engine-0", "load", train_version=1)
    assert list(stage.metrics.on_step([done(5, InputKind.TRAINED, 1, 2), load])) == []
    assert (stage.folder / "metrics.jsonl").read_text() == ""


def test_a_number_that_json_lacks_is_null(stage: Stage) -> None:
    stage.batch(0, version=0, metrics={**TRAINED, "ratio_max": math.inf, "approx_kl": math.nan})
    stage.metrics.on_step([done(1, InputKind.TRAINED, 0, 1), step(1, 1, 0)])
    (line,) = metrics_of(stage.folder)
    assert (line["ratio_max"], line["approx_kl"], line["loss"]) == (None, None, 0.5)


def test_an_old_file_is_never_overwritten(stage: Stage) -> None:
    with pytest.raises(FileExistsError):
        StepMetrics(stage.folder / "metrics.jsonl", stage.work.get)
