"""The milestones that people's log tells, from hand-made records."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.trainers.people_log import PeopleLog

ROW = Record(9, 0, RecordKind.TRANSITION)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        (
            ROW._replace(machine="run", source="running", dest="draining", reason="sigint"),
            {"event": "run_draining", "reason": "sigint", "log_level": "info"},
        ),
        (
            ROW._replace(machine="run", source="starting", dest="running"),
            {"event": "run_running", "log_level": "info"},
        ),
        (
            ROW._replace(kind=RecordKind.CHECKPOINT, train_version=7, message="out/step-000007"),
            {"event": "checkpoint_saved", "train_version": 7, "path": "out/step-000007", "log_level": "info"},
        ),
        (
            ROW._replace(kind=RecordKind.DROP, batch_id=0, reason="stale", staleness=3),
            {"event": "batch_dropped", "batch_id": 0, "reason": "stale", "staleness": 3, "log_level": "info"},
        ),
        (
            ROW._replace(
                machine="engine", trigger="restart", engine=1, reason="EngineLost", message="the server is gone"
            ),
            {
                "event": "engine_restarting",
                "engine": 1,
                "reason": "EngineLost",
                "message": "the server is gone",
                "log_level": "warning",
            },
        ),
        (
            ROW._replace(machine="batch", trigger="fail", dest="failed", batch_id=5, reason="engine_lost"),
            {"event": "batch_lost", "batch_id": 5, "reason": "engine_lost", "log_level": "warning"},
        ),
        (
            ROW._replace(kind=RecordKind.IGNORED, cause_seq=4, trigger="generated", reason="late"),
            {
                "event": "completion_ignored",
                "seq": 4,
                "trigger": "generated",
                "reason": "late",
                "log_level": "warning",
            },
        ),
    ],
)
def test_a_milestone_is_one_line(record: Record, line: dict[str, Any]) -> None:
    with capture_logs() as lines:
        assert list(PeopleLog().on_step([record])) == [], "a view adds nothing to the log"
    assert lines == [line]


def test_the_rest_is_not_told() -> None:
    quiet = [
        ROW._replace(machine="rollout", source="ready", dest="generating"),
        ROW._replace(machine="trainer", source="waiting", dest="checking"),
        ROW._replace(machine="run", source="stopping", dest="stopped"),
        ROW._replace(kind=RecordKind.METRIC, reason="loss", value=0.5),
        ROW._replace(kind=RecordKind.INPUT, trigger="generated"),
    ]
    with capture_logs() as lines:
        PeopleLog().on_step(quiet)
    assert lines == []
