"""The figures of a summary against values worked out by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fsm_trainer.analysis import load_events, summarize
from fsm_trainer.analysis.frames import ended_batches, intervals, operations, residency
from fsm_trainer.analysis.overlap import measure_sides, training_window
from fsm_trainer.analysis.summary import StalenessRow, Summary
from fsm_trainer.analysis.summary_text import render
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import CommandKind, Record, RecordKind
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from tests.analysis.worlds import records_of
from tests.replay.virtual_run import MS, log_of, virtual_run

SYNCHRONOUS = SchedulerConfig(max_steps=20, max_staleness=0)


def summary_of(path: Path, config: SchedulerConfig, **kwargs: object) -> Summary:
    return summarize(log_of(path, virtual_run(config, **kwargs), config))  # type: ignore[arg-type]


def spent_ms(summary: Summary, entity: str) -> dict[tuple[str, str | None], float]:
    return {(row.state, row.cause): row.ns / MS for row in summary.residency if row.entity == entity}


def test_frame_has_arrow_types_and_every_row(tmp_path: Path) -> None:
    rows = virtual_run(SYNCHRONOUS, metrics=True)
    events = load_events(log_of(tmp_path, rows, SYNCHRONOUS))
    assert list(events.columns) == list(Record._fields)
    assert all(isinstance(dtype, pd.ArrowDtype) for dtype in events.dtypes)
    assert events["seq"].tolist() == list(range(len(rows)))
    assert events["kind"].tolist() == [row.kind.value for row in rows]
    assert events["staleness"].isna().sum() == sum(row.staleness is None for row in rows)


def test_synchronous_run_by_hand(tmp_path: Path) -> None:
    """Durations: start 50 and 80, generate 100, reward 5, train 60, export 4, load 3, save 20 ms; 20 steps.

    The first export (4) ends before the engine is up (80), its first load at 83. 20 times 165 ms and between them 19
    syncs of 7 ms are 3433 ms; the save makes 3536 ms in all.
    """
    found = summary_of(tmp_path, SYNCHRONOUS)
    assert (found.state, found.outcome, found.message) == ("ended", "completed", "max_steps reached")
    assert (found.steps, found.train_version, found.rollout_versions) == (20, 20, {"0": 19})
    assert found.wall_ns == 3536 * MS
    assert found.batches == {"admitted": 20, "trained": 20, "dropped": 0, "failed": 0, "cancelled": 0, "open": 0}
    assert found.staleness == (StalenessRow(0, 20, 0),)
    assert spent_ms(found, "trainer") == {
        ("waiting", "generation"): 2000,
        ("training", None): 1200,
        ("waiting", "reward"): 100,
        ("syncing", None): 80,
        ("waiting", "starting"): 50 + 29,
        ("waiting", "weight_sync"): 19 * 3,
        ("saving", None): 20,
    }
    assert spent_ms(found, "rollout-0")["generating", None] == 2000
    assert spent_ms(found, "engine-0")["loading", None] == 20 * 3
    assert found.sides is not None
    assert found.sides.rollout_idle == pytest.approx(1 - 2100 / 3453)
    assert found.sides.trainer_idle == pytest.approx((2000 + 100 + 57) / 3453)
    assert found.sides.bound == "generation"
    overlap = found.overlap
    assert overlap is not None
    assert overlap.rollout_s == pytest.approx(0.105)
    assert overlap.reward_s == pytest.approx(0.005)
    assert overlap.train_s == pytest.approx(0.060)
    assert overlap.sync_s == pytest.approx((0.004 + 0.003) * 19 / 20)
    assert overlap.step_s == pytest.approx(3.433 / 20)
    assert overlap.synchronous_s == pytest.approx(3.433 / 20)
    assert overlap.limit == pytest.approx(171.65 / 105)
    assert overlap.speedup == pytest.approx(1.0)
    assert overlap.reached == pytest.approx(105 / 171.65)


@pytest.mark.parametrize(
    "durations",
    [
        {},
        {CommandKind.TRAIN: 150},
        {CommandKind.LOAD_WEIGHTS: 50},
        {CommandKind.REWARD: 60, CommandKind.LOAD_WEIGHTS: 30},
        {CommandKind.EXPORT: 70},
    ],
)
def test_overlap_never_exceeds_its_limit(tmp_path: Path, durations: dict[CommandKind, int]) -> None:
    for number, config in enumerate(
        [
            SchedulerConfig(max_steps=60),
            SchedulerConfig(max_steps=60, workers=2, max_staleness=2),
            SchedulerConfig(max_steps=60, workers=2, engines=2, max_staleness=3, queue_size=3),
            SchedulerConfig(max_steps=60, workers=2, engines=2, admission="greedy"),
        ]
    ):
        found = summarize(log_of(tmp_path / str(number), virtual_run(config, durations), config)).overlap
        assert found is not None
        assert 0.3 < found.reached <= 1.0, (config, found)
        assert found.speedup <= found.limit


def test_overlapped_run_comes_close_to_the_limit_and_never_above(tmp_path: Path) -> None:
    found = summary_of(tmp_path, SchedulerConfig(max_steps=100))
    assert found.overlap is not None
    assert 0.97 < found.overlap.reached <= 1.0
    assert found.staleness == (StalenessRow(0, 1, 0), StalenessRow(1, 99, 0))


@pytest.mark.parametrize(
    ("durations", "bound"),
    [
        ({}, "generation"),
        ({CommandKind.GENERATE: 20, CommandKind.REWARD: 100}, "reward"),
        ({CommandKind.TRAIN: 300}, "training"),
        ({CommandKind.EXPORT: 300}, "sync"),
        ({CommandKind.LOAD_WEIGHTS: 300}, "sync"),
        ({CommandKind.GENERATE: 95, CommandKind.TRAIN: 97}, "balanced"),
    ],
)
def test_what_bounds_the_run(tmp_path: Path, durations: dict[CommandKind, int], bound: str) -> None:
    found = summary_of(tmp_path, SchedulerConfig(max_steps=30), durations_ms=durations)
    assert found.sides is not None
    assert found.sides.bound == bound, render(found)


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(max_steps=9, workers=3, engines=2, max_staleness=2, sync_interval=2, save_interval=4),
        SchedulerConfig(max_steps=9, workers=2, engines=2, admission="greedy", queue_size=1, max_staleness=0),
        SchedulerConfig(max_steps=9, workers=2, admission="lockstep", max_staleness=1),
    ],
    ids=lambda config: config.admission,
)
@pytest.mark.parametrize("fault", [None, 5])
def test_residency_of_every_machine_sums_to_wall_time(
    tmp_path: Path, config: SchedulerConfig, fault: int | None
) -> None:
    found = summary_of(tmp_path, config, fail_generation_of=fault)
    totals: dict[str, int] = {}
    for row in found.residency:
        totals[row.entity] = totals.get(row.entity, 0) + row.ns
    assert totals == dict.fromkeys(totals, found.wall_ns)
    expected = {"run", "trainer"} | {f"rollout-{i}" for i in range(config.workers)}
    assert set(totals) == expected | {f"engine-{i}" for i in range(config.engines)}
    assert sum(row.share for row in found.residency) == pytest.approx(len(totals))
    waits = {(row.machine, row.state) for row in found.residency if row.cause is not None}
    without = [row for row in found.residency if (row.machine, row.state) in waits and row.cause is None]
    assert without == [], "no wait is without a cause"


def test_batches_by_what_became_of_them(tmp_path: Path) -> None:
    config = SchedulerConfig(max_staleness=1)
    found = summary_of(tmp_path, config, prompts=10, degenerate={2, 3}, no_step={5})
    assert found.batches["trained"] == found.steps == 7
    assert found.batches["dropped"] == 3
    assert found.batches["open"] == 0
    assert found.drops == {"degenerate": 2, "no_step": 1}
    assert sum(row.dropped for row in found.staleness) == 3
    assert found.message == "prompts exhausted"


def test_stale_drops_of_greedy(tmp_path: Path) -> None:
    config = SchedulerConfig(max_steps=40, workers=3, engines=3, admission="greedy", max_staleness=1)
    rows = virtual_run(config, {CommandKind.GENERATE: 37})
    found = summarize(log_of(tmp_path, rows, config))
    drops = [row for row in rows if row.kind is RecordKind.DROP]
    assert len(drops) > 0
    assert found.drops == {"stale": len(drops)}
    assert all(row.trained == 0 for row in found.staleness if row.staleness > 1)
    assert sum(row.dropped for row in found.staleness if row.staleness > 1) == len(drops)


def test_failed_run_says_why(tmp_path: Path) -> None:
    found = summary_of(tmp_path, SchedulerConfig(max_steps=9), fail_generation_of=4)
    assert found.outcome == "failed"
    assert found.batches["failed"] == 1
    assert "failed: rollout-0: generate of batch 4 failed: RuntimeError: no memory" in render(found)


def test_a_run_cut_anywhere_is_summarized(tmp_path: Path) -> None:
    rows = virtual_run(SchedulerConfig(max_steps=3))
    for size in range(0, len(rows), 4):
        found = summarize(log_of(tmp_path / str(size), rows[:size], SchedulerConfig(max_steps=3)))
        assert (found.state, found.outcome, found.events) == ("crashed", None, size)
        assert "crashed: the log has no run_end" in render(found)
        totals = pd.Series([r.ns for r in found.residency], [r.entity for r in found.residency], dtype="int64")
        assert set(totals.groupby(level=0).sum()) <= {found.wall_ns}


def test_a_run_still_going_says_so(tmp_path: Path) -> None:
    rows = virtual_run(SchedulerConfig(max_steps=3))
    with EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(SchedulerConfig(), {})) as writer:
        for row in rows[:100]:
            writer.append(row)
        writer.flush()
        found = summarize(tmp_path)
        assert found.state == "running"
        assert "still going" in render(found)
    assert found.batches["open"] > 0


def hand_made() -> pd.DataFrame:
    """Two machines over 100 ns: the trainer waits for generation 10..40, then for reward ..60, trains to the end."""
    rows = [
        Record(0, 0, RecordKind.INPUT, trigger="begin"),
        Record(1, 10, RecordKind.TRANSITION, "run", "run", "run", "starting", "running"),
        Record(2, 10, RecordKind.WAIT, "trainer", "trainer", source="waiting", reason="generation"),
        Record(3, 20, RecordKind.TRANSITION, "rollout", "rollout-0", "admit", "idle", "generating"),
        Record(4, 40, RecordKind.WAIT, "trainer", "trainer", source="waiting", reason="reward"),
        Record(5, 60, RecordKind.TRANSITION, "trainer", "trainer", "train", "waiting", "training"),
        Record(6, 60, RecordKind.TRANSITION, "batch", "batch-0", "train", "queued", "training", batch_id=0),
        Record(7, 100, RecordKind.METRIC, value=1.0),
    ]
    frame = pd.DataFrame([row._asdict() for row in rows])
    integers = [n for n in Record._fields if frame[n].map(lambda v: isinstance(v, int) or v is None or v != v).all()]
    texts = ["machine", "entity", "trigger", "source", "dest", "reason", "digest", "message"]
    types = dict.fromkeys(set(integers) - set(texts), "int64[pyarrow]") | dict.fromkeys([*texts, "kind"], "str")
    return frame.assign(kind=[row.kind.value for row in rows]).astype(types)


def test_intervals_by_hand() -> None:
    spans = intervals(hand_made())
    trainer = spans[spans["entity"] == "trainer"]
    found = list(
        zip(
            trainer["state"],
            trainer["cause"].astype(object).fillna(""),
            trainer["start_ns"],
            trainer["end_ns"],
            strict=True,
        )
    )
    assert found == [
        ("waiting", "", 0, 10),
        ("waiting", "generation", 10, 40),
        ("waiting", "reward", 40, 60),
        ("training", "", 60, 100),
    ]
    assert set(spans["entity"]) == {"run", "trainer", "rollout-0"}, "a batch is no machine that idles"


def test_residency_within_a_stretch_by_hand() -> None:
    spent = residency(intervals(hand_made()), 30, 70)
    trainer = spent[spent["entity"] == "trainer"]
    found = dict(
        zip(zip(trainer["state"], trainer["cause"].astype(object).fillna(""), strict=True), trainer["ns"], strict=True)
    )
    assert found == {("waiting", "reward"): 20, ("waiting", "generation"): 10, ("training", ""): 10}


def test_sides_by_hand() -> None:
    events = hand_made()
    window = training_window(events)
    assert window is not None
    assert (window.start_ns, window.end_ns) == (10, 100)
    sides = measure_sides(intervals(events), window)
    assert sides is not None
    assert sides.rollout_idle == pytest.approx(10 / 90)
    assert sides.trainer_idle == pytest.approx(50 / 90)
    assert sides.bound == "generation"


def test_operations_join_completions_to_their_commands(tmp_path: Path) -> None:
    events = load_events(log_of(tmp_path, virtual_run(SYNCHRONOUS), SYNCHRONOUS))
    started = events[(events["kind"] == "input") & (events["trigger"] == "started")]
    events = pd.concat([events, started.assign(trigger="engine_died")])
    done = operations(events)
    assert set(done[done["command"] == "start_engine"]["outcome"]) == {"started"}
    assert len(done) == done["op"].nunique()
    assert set(done[done["command"] == "train"]["duration_ns"]) == {60 * MS}
    assert done[done["command"] == "generate"]["batch_id"].tolist() == list(range(20))
    assert set(done[done["command"] == "generate"]["entity"]) == {"rollout-0"}
    assert ended_batches(events)["batch_id"].tolist() == list(range(20))


@pytest.mark.parametrize(
    ("other", "synchronous"),
    [({}, True), ({"max_staleness": 1}, False), ({"workers": 2}, False), ({"admission": "greedy"}, False)],
)
def test_a_run_that_may_overlap_is_not_synchronous(tmp_path: Path, other: dict[str, Any], synchronous: bool) -> None:
    found = summary_of(tmp_path, dataclasses.replace(SYNCHRONOUS, **other))
    assert found.synchronous is synchronous
    assert ("nothing overlaps" in render(found)) is synchronous
    assert ("of the limit" in render(found)) is not synchronous


def test_what_the_loads_of_weights_cost(tmp_path: Path) -> None:
    config, records = records_of("paced")
    found = summarize(log_of(tmp_path, list(records), config))
    loads = [r for r in records if r.kind is RecordKind.VERSION and r.trigger == "load"]
    odd = [version for r in loads if (version := r.rollout_version_last or 0) % 2]
    sized = [v for v in odd if v % 3]
    assert len(odd) > len(sized) > 3
    assert found.syncs is not None
    assert found.syncs.loads == len(odd)
    assert found.syncs.pause_s == pytest.approx(sum(odd) / len(odd) / 8)
    assert found.syncs.resume_s == pytest.approx(sum(odd) / len(odd) / 16)
    assert found.syncs.nbytes == pytest.approx(1000 * sum(sized) / len(sized))
    assert found.syncs.bytes_per_s == pytest.approx(4000), "over the seconds of those whose bytes are known"
    assert "at 4e-06 GB/s, pause " in render(found)
    silent = summary_of(tmp_path / "silent", SchedulerConfig(max_steps=5))
    assert silent.syncs is None
    assert "weight syncs" not in render(silent)


def test_json_form_is_json(tmp_path: Path) -> None:
    found = summary_of(tmp_path, SchedulerConfig(max_steps=5))
    assert json.loads(json.dumps(found.to_dict()))["batches"]["trained"] == 5


def test_text_shows_every_section(tmp_path: Path) -> None:
    text = render(summary_of(tmp_path, SYNCHRONOUS))
    for part in (
        "outcome           completed: max_steps reached",
        "optimiser steps   20",
        "20 trained, 0 dropped",
        "drops by reason   none",
        "waiting (generation)             2.000   56.6 %",
        "idle share",
        "bound by          generation",
        "limit of overlap  1.63x; nothing overlaps in a synchronous run, only in one of an async algorithm",
    ):
        assert part in text, text
