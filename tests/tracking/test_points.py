"""Points against the frames, which come to the same figures by another way."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fsm_trainer.analysis import steps_frame
from fsm_trainer.analysis.steps import TRAINER_CAUSES
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.tracking.export import points_of
from fsm_trainer.tracking.points import KINDS, Point, PointStream
from tests.analysis.worlds import WORLDS, records_of
from tests.replay.virtual_run import log_of


def stream(records: tuple[Record, ...]) -> list[Point]:
    points = PointStream()
    found = [point for record in records if record.kind in KINDS for point in points.take(record)]
    return [*found, *points.close()]


@pytest.mark.parametrize("name", WORLDS)
def test_points_say_what_the_frames_say(name: str, tmp_path: Path) -> None:
    config, records = records_of(name)
    run = log_of(tmp_path, list(records), config)
    points = {point.step: point.values for point in stream(records)}
    steps = steps_frame(run)
    assert list(points) == steps["step"].tolist()
    for row in steps.to_dict("records"):
        values = points[row["step"]]
        for column in ("interval_s", "waiting_s", "staleness", "staleness_in_flight", "staleness_in_queue"):
            assert values[f"run/{column}"] == pytest.approx(float(row[column]), abs=1e-9), column
        for cause in TRAINER_CAUSES:
            assert values.get(f"run/waiting_{cause}_s", 0.0) == pytest.approx(row[f"waiting_{cause}_s"], abs=1e-9)
        for metric in ("reward_mean", "tokens", "ratio_mean", "approx_kl"):
            np.testing.assert_equal(values[metric], row[metric])


@pytest.mark.parametrize("name", WORLDS)
def test_batches_are_counted(name: str) -> None:
    records = records_of(name)[1]
    points = {point.step: point.values for point in stream(records)}
    ends = Counter[str]()
    for record in records:
        if record.machine == "batch" and record.dest in ("trained", "dropped"):
            ends.update([record.dest, f"dropped_{record.reason}"] if record.dest == "dropped" else [record.dest])
        if record.kind is RecordKind.VERSION and record.trigger == "step":
            values = points[record.train_version or 0]
            counted = {name[4:]: value for name, value in values.items() if name.startswith(("run/tr", "run/dr"))}
            assert counted == {"dropped": 0, **ends}


def test_publish_lag_is_what_each_engine_is_behind() -> None:
    _, records = records_of("greedy, drops")
    served: dict[int | None, int] = {}
    points = {point.step: point.values for point in stream(records)}
    for record in records:
        if record.kind is RecordKind.VERSION and record.trigger == "load":
            served[record.engine] = record.rollout_version_last or 0
        if record.kind is RecordKind.VERSION and record.trigger == "step":
            step = record.train_version or 0
            lags = {f"run/publish_lag_engine-{engine}": step - version for engine, version in served.items()}
            assert {name: value for name, value in points[step].items() if "publish_lag" in name} == lags


def test_a_metric_of_another_version_is_a_point_of_its_own() -> None:
    metric = Record(1, 5, RecordKind.METRIC, train_version=3, reason="eval/reward", value=0.5)
    other = metric._replace(seq=2, train_version=4, reason="loss", value=math.inf)
    nothing = metric._replace(seq=3, train_version=None)
    begin = Record(4, 9, RecordKind.INPUT, trigger="tick")
    points = PointStream()
    assert [points.take(row) for row in (metric, other, nothing)] == [[], [], []]
    assert points.take(begin) == [Point(3, 5, {"eval/reward": 0.5}), Point(4, 5, {"loss": math.inf})]
    assert points.close() == []


def test_a_log_gives_the_points_of_its_records(tmp_path: Path) -> None:
    config, records = records_of("paced, own engines, saves")
    run = log_of(tmp_path, list(records), config)
    for one, other in zip(points_of(read_log(run)), stream(records), strict=True):
        assert (one.step, one.t_ns, list(one.values)) == (other.step, other.t_ns, list(other.values))
        np.testing.assert_equal(list(one.values.values()), list(other.values.values()))
