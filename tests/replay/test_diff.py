"""The first decision in which two runs differ, and what is no difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.replay.diff import DecisionDiff, diff_decisions
from tests.replay.virtual_run import DURATIONS_MS, log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=5)
ROWS = virtual_run(CONFIG, metrics=True)


def diff(tmp_path: Path, one: list[Record], other: list[Record]) -> DecisionDiff:
    logs = [log_of(tmp_path / name, rows, CONFIG) for name, rows in (("a", one), ("b", other))]
    return diff_decisions(read_log(logs[0]), read_log(logs[1]))


def test_times_metrics_and_messages_are_no_difference(tmp_path: Path) -> None:
    decisions = sum(r.kind not in ("input", "metric") for r in ROWS)
    # Twice as slow throughout: the same order of completions, so the same decisions at other times.
    slow = virtual_run(CONFIG, {kind: 2 * ms for kind, ms in DURATIONS_MS.items()})
    assert diff(tmp_path, ROWS, slow) == DecisionDiff(decisions, (decisions, decisions), (), None)
    without = [r._replace(seq=i) for i, r in enumerate(r for r in ROWS if r.kind != "metric")]
    by_old = {r.seq: i for i, r in enumerate(r for r in ROWS if r.kind != "metric")}
    without = [r._replace(cause_seq=by_old.get(r.cause_seq)) if r.cause_seq is not None else r for r in without]
    changed = [r._replace(message="other", tokens=1) if r.kind == "transition" else r for r in without]
    same = diff(tmp_path / "x", ROWS, changed)
    assert same == DecisionDiff(decisions, (decisions, decisions), (), None)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("transition", {"dest": "failed"}),
        ("command", {"batch_id": 99}),
        ("wait", {"reason": "admission"}),
        ("queue", {"queue_len": None}),
        ("version", {"train_version": 77}),
        ("run_end", {"reason": "failed"}),
    ],
)
def test_the_first_change_is_found(tmp_path: Path, kind: str, change: dict[str, object]) -> None:
    at = [r.seq for r in ROWS if r.kind == kind][-1]
    changed = [*ROWS[:at], ROWS[at]._replace(**change), *ROWS[at + 1 :]]  # type: ignore[arg-type]
    found = diff(tmp_path, ROWS, changed)
    assert found.first is not None
    assert found.columns == tuple(change)
    assert found.same == sum(r.kind not in ("input", "metric") for r in ROWS[:at])
    one, other = found.first
    assert one.decision is not None and other.decision is not None
    assert one.decision["seq"] == other.decision["seq"] == at
    assert other.decision.get(next(iter(change))) == next(iter(change.values()))
    assert one.input is not None
    assert one.input["seq"] == ROWS[at].cause_seq


def test_a_log_that_ends_earlier_differs_there(tmp_path: Path) -> None:
    found = diff(tmp_path, ROWS, ROWS[:100])
    assert found.first is not None
    assert (found.columns, found.first[1].decision) == ((), None)
    assert found.first[0].decision is not None
    assert found.first[0].decision["seq"] == next(r.seq for r in ROWS[100:] if r.kind not in ("input", "metric"))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(log_of(tmp_path / "a", ROWS, CONFIG))
    wider = SchedulerConfig(max_steps=5, max_staleness=2, workers=2)
    other = str(log_of(tmp_path / "b", virtual_run(wider), wider))
    assert main(["diff", one, one]) == 0
    text = capsys.readouterr().out
    assert "are the same" in text
    assert "all settings are the same" in text
    assert main(["diff", one, other]) == 1
    text = capsys.readouterr().out
    assert "then they differ" in text
    assert ["scheduler.max_staleness", "1", "2"] in [line.split() for line in text.splitlines()]
    (idle,) = [line.split() for line in text.splitlines() if line.startswith("trainer idle (share)")]
    assert idle[-1] == "points"
    assert float(idle[-2]) == pytest.approx(100 * (float(idle[-3]) - float(idle[-4])), abs=0.1)
    assert main(["diff", one, other, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["scheduler.workers"] == {"a": 1, "b": 2}
    assert found["figures"]["optimiser steps"] == {"a": 5, "b": 5}
    assert found["first_difference"]["a"]["decision"] != found["first_difference"]["b"]["decision"]


def test_bad_second_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = str(log_of(tmp_path / "a", ROWS, CONFIG))
    for other in (str(tmp_path / "none"), "x" * 5000):
        assert main(["diff", one, other]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert other[:80] in line
        assert len(line) < 400
