"""What a display is given, from hand-made records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.core.scheduler import Scheduler, Status
from fsm_trainer.trainers.progress import Progress, ProgressTracker

SECOND = 1_000_000_000


class Stage:
    """A tracker whose status and metrics the test sets."""

    def __init__(self, total: int | None = 8) -> None:
        self.train_version = 0
        self.metrics: dict[str, float] = {}
        self.tracker = ProgressTracker(self.status, lambda: self.metrics, total)

    def status(self) -> Status:
        base = Scheduler(SchedulerConfig()).status()
        return Status(**{**vars(base), "run": "running", "train_version": self.train_version})

    def see(self, record: Record) -> Progress:
        assert list(self.tracker.on_step([record])) == [], "a view adds nothing to the log"
        return self.tracker.newest


def generated(t_s: int, tokens: int) -> Record:
    return Record(0, t_s * SECOND, RecordKind.TRANSITION, "batch", "batch-0", "generated", tokens=tokens)


RUN_UP = Record(0, 10 * SECOND, RecordKind.TRANSITION, "run", "run", "run", "starting", "running")


def test_before_anything_happened() -> None:
    progress = Stage().tracker.newest
    assert (progress.status.train_version, progress.elapsed_s, progress.tokens_per_s) == (0, 0.0, 0.0)
    assert progress.left_s is None


def test_time_and_tokens_count_from_when_the_run_was_up() -> None:
    stage = Stage()
    stage.see(Record(0, 9 * SECOND, RecordKind.INPUT, trigger="started"))
    stage.see(RUN_UP)
    stage.see(generated(12, 300))
    stage.train_version = 2
    stage.metrics = {"reward_mean": 0.25}
    progress = stage.see(generated(14, 500))
    assert (progress.elapsed_s, progress.tokens_per_s, progress.total_steps) == (4.0, 200.0, 8)
    assert progress.left_s == pytest.approx(12.0)  # 2 s a step, 6 to go
    assert progress.metrics == {"reward_mean": 0.25}
    assert progress.status.train_version == 2


def test_steps_before_a_resume_took_no_time_of_this_run() -> None:
    stage = Stage()
    stage.see(RUN_UP)
    stage.train_version = 6
    progress = replace(stage.see(generated(14, 500)), steps_before=4)
    assert progress.left_s == pytest.approx(4.0)  # 4 s for 2 steps, 2 to go


def test_drops_are_counted() -> None:
    stage = Stage()
    for batch in range(3):
        stage.see(Record(0, SECOND, RecordKind.DROP, "batch", f"batch-{batch}", reason="stale"))
    assert stage.tracker.newest.dropped == 3


def test_no_end_in_sight_no_time_left() -> None:
    stage = Stage(total=None)
    stage.train_version = 5
    stage.see(RUN_UP)
    assert stage.see(generated(12, 1)).left_s is None


@pytest.mark.parametrize("state", ["draining", "stopped", "failed"])
def test_a_run_that_takes_no_more_steps_has_no_time_left(state: str) -> None:
    stage = Stage()
    stage.see(RUN_UP)
    stage.train_version = 2
    moment = stage.see(generated(14, 500))
    assert moment.left_s is not None
    assert replace(moment, status=replace(moment.status, run=state)).left_s is None


def test_a_moment_once_read_does_not_change() -> None:
    stage = Stage()
    before = stage.see(RUN_UP)
    stage.train_version = 7
    stage.see(generated(12, 100))
    assert (before.status.train_version, before.tokens_per_s) == (0, 0.0)


def test_engines_are_starting_until_they_have_or_have_failed() -> None:
    stage = Stage()
    stage.tracker._now_ns = lambda: 30 * SECOND
    start = CommandKind.START_ENGINE.value
    for op, engine in ((5, 0), (6, 1)):
        stage.see(Record(op, (10 + engine) * SECOND, RecordKind.COMMAND, trigger=start, engine=engine))
    assert stage.tracker.read().starting_s == {0: 20.0, 1: 19.0}
    stage.see(Record(7, 12 * SECOND, RecordKind.INPUT, trigger="started", cause_seq=5))
    stage.see(Record(8, 12 * SECOND, RecordKind.INPUT, trigger="tick"))
    assert stage.tracker.read().starting_s == {1: 19.0}
    stage.see(Record(9, 13 * SECOND, RecordKind.INPUT, trigger="failed", cause_seq=6))
    # A restart.
    stage.see(Record(10, 29 * SECOND, RecordKind.COMMAND, trigger=start, engine=1))
    assert stage.tracker.read().starting_s == {1: 1.0}
