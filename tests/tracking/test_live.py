"""Trackers during a run: what they get equals an export, and what they do wrong changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from fsm_trainer.cli.replay import main
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from fsm_trainer.replay.verify import verify
from fsm_trainer.simulate.sink import MemorySink
from fsm_trainer.simulate.virtual import VirtualRun
from fsm_trainer.tracking.export import points_of
from fsm_trainer.tracking.live import LiveTracking
from fsm_trainer.tracking.points import Point
from fsm_trainer.tracking.trackers import RunInfo, TensorBoardTracker, Tracker
from tests.analysis.worlds import WORLDS, Measures
from tests.tracking.readers import read_tensorboard


class Kept:
    """A tracker in memory."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.closed = False

    def log(self, point: Point) -> None:
        self.points.append(point)

    def close(self) -> None:
        self.closed = True


class Failing(Kept):
    """Takes so many points, then raises at each."""

    def __init__(self, after: int, error: BaseException) -> None:
        super().__init__()
        self._after = after
        self._error = error

    def log(self, point: Point) -> None:
        if len(self.points) == self._after:
            raise self._error
        super().log(point)


def virtual_run(folder: Path, trackers: dict[str, Any], **options: Any) -> tuple[LiveTracking, list[Any]]:
    """Run a world with a real log and trackers; the tracking, and what was told on the way."""
    config, behaviour = WORLDS["greedy, drops"]
    folder.mkdir()
    with capture_logs() as told:
        tracking = LiveTracking(trackers, **options)
        with EventLogWriter(folder / LOG_NAME, metadata=log_metadata(config, {})) as log:
            run = VirtualRun(config, behaviour, sink=tracking.tap(log), observers=[Measures(), tracking])
            assert run.run().outcome == "completed"
        tracking.close()
    return tracking, told


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("fsm-tracker")}


def test_a_tracker_gets_what_the_log_has(tmp_path: Path) -> None:
    kept = Kept()
    _, told = virtual_run(tmp_path / "run", {"kept": lambda: kept})
    expected = list(points_of(read_log(tmp_path / "run")))
    assert len(expected) == 60
    assert repr(kept.points) == repr(expected)
    assert kept.closed
    assert told == []
    assert threads() == set()


def test_streamed_scalars_equal_exported_ones(tmp_path: Path) -> None:
    streamed = tmp_path / "streamed"
    virtual_run(tmp_path / "run", {"tensorboard": lambda: TensorBoardTracker(RunInfo("run", streamed, 0.0))})
    assert main(["export", str(tmp_path / "run"), "--to", "tensorboard", "-o", str(tmp_path / "exported")]) == 0
    found = read_tensorboard(streamed)
    assert len(found) > 1000
    assert repr(found) == repr(read_tensorboard(tmp_path / "exported"))


@pytest.mark.parametrize("error", [RuntimeError("no such host"), SystemExit(1)])
def test_a_tracker_that_fails_is_told_once_and_logged_and_the_others_go_on(
    error: BaseException, tmp_path: Path
) -> None:
    kept = Kept()
    failing = Failing(3, error)
    # It fails only when asked to, so that the row is in the log whatever the threads do.
    gate = threading.Event()

    def make() -> Tracker:
        gate.wait(60)
        return failing

    tracking = LiveTracking({"failing": make, "kept": lambda: kept})
    config, behaviour = WORLDS["greedy, drops"]
    with capture_logs() as told:
        failed = _Opens(gate, tracking)
        (tmp_path / "run").mkdir()
        with EventLogWriter(tmp_path / "run" / LOG_NAME, metadata=log_metadata(config, {})) as log:
            VirtualRun(config, behaviour, sink=tracking.tap(log), observers=[Measures(), failed, tracking]).run()
        tracking.close()
    assert [(line["event"], line["tracker"], line["log_level"]) for line in told] == [
        ("tracker_failed", "failing", "warning")
    ]
    assert "fsm-replay export RUN --to failing" in told[0]["hint"]
    log = read_log(tmp_path / "run")
    (row,) = [r for r in records(log.table) if (r.reason or "").startswith("tracker_failed")]
    assert (row.kind, row.reason, row.value) == (RecordKind.METRIC, "tracker_failed/failing", 1.0)
    assert str(error) in (row.message or "")
    assert repr(kept.points) == repr(list(points_of(log)))
    assert verify(tmp_path / "run").ok
    assert len(failing.points) == 3


class _Opens:
    """An observer that, in the middle of the run, lets the tracker fail and waits until it has."""

    def __init__(self, gate: threading.Event, tracking: LiveTracking) -> None:
        self._gate = gate
        self._feed = next(feed for feed in tracking._feeds if feed.name == "failing")

    def on_step(self, records: Sequence[Record]) -> Sequence[Record]:
        if any(r.trigger == "step" and r.train_version == 20 for r in records):
            self._gate.set()
            assert self._feed._given_up.wait(60)
        return ()


def test_a_tracker_that_cannot_be_made_is_a_failure_too(tmp_path: Path) -> None:
    def make() -> Tracker:
        raise ConnectionError("cannot log in")

    _, told = virtual_run(tmp_path / "run", {"far": make})
    assert [line["message"].split(" (")[0] for line in told] == ["ConnectionError: cannot log in"]
    assert read_log(tmp_path / "run").complete


def test_a_tracker_that_falls_behind_is_given_up(tmp_path: Path) -> None:
    release = threading.Event()

    class Slow(Kept):
        def log(self, point: Point) -> None:
            release.wait(60)
            super().log(point)

    slow = Slow()
    config, behaviour = WORLDS["greedy, drops"]
    with capture_logs() as told:
        tracking = LiveTracking({"slow": lambda: slow}, max_behind=100)
        sink = MemorySink()
        run = VirtualRun(config, behaviour, sink=tracking.tap(sink), observers=[Measures(), tracking])
        assert run.run().outcome == "completed"
        release.set()
        tracking.close()
    assert [line["message"] for line in told] == ["it is 100 rows behind"]
    assert [r.reason for r in sink.records if r.message == "it is 100 rows behind"] == ["tracker_failed/slow"]
    assert len(slow.points) < 60
    assert threads() == set()


def test_a_tracker_that_does_not_end_is_left_behind() -> None:
    release = threading.Event()

    class Stuck(Kept):
        def close(self) -> None:
            release.wait(60)
            raise ConnectionError("broken off")

    tracking = LiveTracking({"stuck": Stuck})
    with capture_logs() as told:
        tracking.close(timeout_s=0.0)
        release.set()
        assert all(feed.ended(60) for feed in tracking._feeds)
    assert [(line["event"], line["tracker"]) for line in told] == [("tracker_left_behind", "stuck")]


def test_rows_that_the_log_refuses_are_not_sent() -> None:
    kept = Kept()
    tracking = LiveTracking({"kept": lambda: kept})
    log = tracking.tap(MemorySink(fail_at=1))
    metric = Record(0, 0, RecordKind.METRIC, reason="loss", value=1.0, train_version=1)
    log.append(metric)
    with pytest.raises(OSError, match="no space left"):
        log.append(metric._replace(seq=1, train_version=2))
    tracking.close()
    assert kept.points == [Point(1, 0, {"loss": 1.0})]


def test_no_trackers_no_tap() -> None:
    sink = MemorySink()
    tracking = LiveTracking({})
    assert tracking.tap(sink) is sink
    assert tracking.on_step([]) == []
    tracking.close()
