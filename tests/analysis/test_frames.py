"""The frames against a plain pass over the records, the simulator's own figures, and values worked out by hand."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fsm_trainer.analysis import (
    COLUMNS,
    batches_frame,
    load_events,
    residency_frame,
    staleness_frame,
    steps_frame,
    sync_frame,
)
from fsm_trainer.analysis.page import DOCS, with_tables
from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.simulate.durations import Durations
from fsm_trainer.simulate.simulator import simulate
from tests.analysis import plain
from tests.analysis.worlds import WORLDS, records_of
from tests.replay.virtual_run import log_of, virtual_run

GOLDEN = Path(__file__).parents[1] / "golden"
FRAMES = {f.__name__: f for f in (batches_frame, steps_frame, residency_frame, staleness_frame, sync_frame)}


@pytest.fixture(params=WORLDS)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, tuple[Record, ...]]:
    config, records = records_of(request.param)
    return log_of(tmp_path, list(records), config), records


def ns(seconds: float) -> int | None:
    """A moment or duration of a frame as whole nanoseconds; None for nan."""
    return None if math.isnan(seconds) else round(seconds * 1e9)


def known(value: Any) -> Any:
    return None if pd.isna(value) else value


def test_batches_are_those_of_a_plain_pass(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    expected = plain.batches(records)
    frame = batches_frame(run)
    assert frame["batch_id"].tolist() == sorted(expected)
    for row in frame.to_dict("records"):
        batch = expected[row["batch_id"]]
        stages = ("admitted", "loaded", "started", "generated", "rewarded", "queued", "consumed", "ended")
        for stage in stages:
            assert ns(row[f"{stage}_at_s"]) == batch.get(stage), (row, batch)
        assert [known(row[name]) for name in ("worker", "engine", "state", "reason", "tokens")] == [
            batch.get(name) for name in ("worker", "engine", "state", "reason", "tokens")
        ]
        assert known(row["rollout_version_first"]) == batch.get("first")
        assert known(row["rollout_version_last"]) == batch.get("last")
        for name in ("started", "rewarded", "consumed"):
            assert known(row[f"train_version_{name}"]) == batch.get(f"version_{name}")
        for name in ("generate", "reward", "train"):
            if row["state"] not in ("failed", "cancelled"):
                assert ns(row[f"{name}_op_s"]) == batch.get(f"{name}_op")


def test_parts_of_a_batch_add_up(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    frame = batches_frame(run)
    used = frame[frame["consumed_at_s"].notna()]
    parts = ["loading_s", "ready_s", "generating_s", "rewarding_s", "parked_s", "queue_s", "training_s"]
    assert np.allclose(used[parts].sum(axis=1), used["ended_at_s"] - used["admitted_at_s"], atol=1e-9, rtol=0)
    assert (used[parts] >= 0).all(axis=None)
    logged = {number: batch["staleness"] for number, batch in plain.batches(records).items() if "consumed" in batch}
    assert dict(zip(used["batch_id"], used["staleness"], strict=True)) == logged
    assert (used["staleness_in_flight"] + used["staleness_in_queue"] == used["staleness"]).all()
    assert used["staleness_at_start"].between(0, used["staleness_in_flight"]).all()


def test_steps_are_those_of_a_plain_pass(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    frame = steps_frame(run)
    expected = plain.steps(records)
    assert list(zip(frame["step"], frame["batch_id"], map(ns, frame["stepped_at_s"]), strict=True)) == expected
    up = next(r.t_ns for r in records if r.machine == "run" and r.trigger == "run") - records[0].t_ns
    batches = plain.batches(records)
    for row, start in zip(frame.to_dict("records"), [up, *(at for _, _, at in expected)], strict=False):
        end = ns(row["stepped_at_s"])
        assert end is not None
        assert ns(row["interval_s"]) == end - start
        spent = Counter[str]()
        for (entity, state, cause), took in plain.time_spent(records, start, end).items():
            if entity == "trainer":
                spent[f"{state}_s"] += took
                spent[f"waiting_{cause}_s"] += took if state == "waiting" else 0
        for name in row:
            if name.endswith("ing_s") and name.split("_")[0] in (
                "training",
                "syncing",
                "saving",
                "checking",
                "waiting",
            ):
                assert ns(row[name]) == spent[name], (name, row)
        assert row["staleness"] == batches[row["batch_id"]]["staleness"]


def test_metrics_stand_at_their_steps(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    frame = steps_frame(run).set_index("step")
    metrics = [r for r in records if r.kind is RecordKind.METRIC]
    logged = [r for r in metrics if r.train_version is not None]
    assert logged
    assert not {r.reason for r in metrics if r.train_version is None} & {*frame.columns}, "loads are no steps"
    for r in logged:
        np.testing.assert_equal(frame.loc[r.train_version, r.reason], r.value)
    names = {r.reason for r in logged}
    assert frame[list(names)].notna().sum().sum() == sum(not math.isnan(r.value or 0.0) for r in logged)


def test_metric_with_a_name_of_the_frame_is_renamed() -> None:
    config, records = records_of("paced")
    renamed = [r._replace(reason="staleness") if r.reason == "tokens" else r for r in records]
    frame = steps_frame(frame_of(renamed))
    assert frame["staleness_metric"].tolist() == [3.0 * step for step in frame["step"]]
    assert frame["staleness"].max() <= config.max_staleness


def frame_of(records: list[Record]) -> pd.DataFrame:
    columns = [pd.Series(column) for column in zip(*records, strict=True)]
    frame = pd.DataFrame(dict(zip(Record._fields, columns, strict=True))).convert_dtypes(dtype_backend="pyarrow")
    return frame.assign(kind=[record.kind.value for record in records])


@pytest.mark.parametrize("window_s", [None, 7.0, 0.5, 1e6])
def test_residency_is_that_of_a_plain_pass(world: tuple[Path, tuple[Record, ...]], window_s: float | None) -> None:
    run, records = world
    frame = residency_frame(run, window_s)
    length = records[-1].t_ns - records[0].t_ns
    width = length if window_s is None else min(round(window_s * 1e9), length)
    windows = [(start, min(start + width, length)) for start in range(0, length, width)]
    rows = frame.groupby(["window_start_s", "window_end_s"], observed=True)
    assert [(ns(start), ns(end)) for start, end in rows.groups] == windows
    for (start, end), found in zip(windows, (group for _, group in rows), strict=True):
        keys = zip(found["entity"], found["state"], map(known, found["cause"]), strict=True)
        spent = dict(zip(keys, map(ns, found["time_s"]), strict=True))
        assert spent == plain.time_spent(records, start, end)
        assert np.allclose(found.groupby("entity", observed=True)["share"].sum(), 1.0)


def test_staleness_says_what_each_consumed_batch_gave(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    frame = staleness_frame(run)
    batches = plain.batches(records)
    taken = sorted((b["consumed"], number) for number, b in batches.items() if "consumed" in b)
    assert frame["batch_id"].tolist() == [number for _, number in taken]
    step_of = {batch: version for version, batch, _ in plain.steps(records)}
    metrics = {(r.train_version, r.reason): r.value for r in records if r.kind is RecordKind.METRIC}
    for row in frame.to_dict("records"):
        step = step_of.get(row["batch_id"])
        assert known(row["step"]) == step
        assert row["state"] == ("dropped" if step is None else "trained")
        for name in ("reward_mean", "ratio_mean", "approx_kl"):
            np.testing.assert_equal(row[name], metrics.get((step, name), math.nan))
        assert math.isnan(row["logprob_gap"])


def test_syncs_are_those_of_a_plain_pass(world: tuple[Path, tuple[Record, ...]]) -> None:
    run, records = world
    frame = sync_frame(run)
    due = {r.train_version: r.t_ns - records[0].t_ns for r in records if r.trigger == "due"}
    engines = {r.engine for r in records if r.machine == "engine" and r.engine is not None}
    assert sorted(zip(frame["version"], frame["engine"], strict=True)) == sorted((v, e) for v in due for e in engines)
    expected = plain.syncs(records)
    for row in frame.to_dict("records"):
        load = expected.get((row["version"], row["engine"]))
        assert row["loaded"] is (load is not None)
        assert ns(row["due_at_s"]) == due[row["version"]]
        if load is None:
            assert known(row["lag"]) is None
            assert known(row["transfer_s"]) is None
            continue
        version = row["version"]
        told = (version / 8, version / 4, version / 16, 1000 * version if version % 3 else None)
        parts = tuple(known(row[name]) for name in ("pause_s", "transfer_s", "resume_s", "nbytes"))
        assert parts == (told if version % 2 else (None,) * 4)
        moments = (load["closed"], load["begun"], load["loaded"])
        assert tuple(ns(row[name]) for name in ("closed_at_s", "load_at_s", "loaded_at_s")) == moments
        assert (known(row["lag"]), known(row["previous_version"])) == (load["lag"], load["before"])
        begin = load["begun"] if load["closed"] is None else load["closed"]
        assert ns(row["load_s"]) == load["took"]
        assert ns(row["closed_s"]) == load["loaded"] - begin
        assert ns(row["publish_s"]) == load["loaded"] - due[row["version"]]


def test_each_load_of_one_version_has_its_own_cost() -> None:
    """As after a restart of the engine; the world's only engine loads its last odd version once more, and slower."""
    rows = list(records_of("paced")[1])
    version = max(r.rollout_version_last or 0 for r in rows if r.reason == "sync_transfer_s")
    first = [r for r in rows if r.rollout_version_last == version and r.engine == 0 and r.machine == "engine"]
    again = [r._replace(seq=rows[-1].seq + i, t_ns=rows[-1].t_ns + i // 2 * 7) for i, r in enumerate(first, 1)]
    # The metrics stand at the moment at which the load was done.
    done = next(r.t_ns for r in again if r.trigger == "open")
    again = [r._replace(t_ns=done, value=(r.value or 0) * 3) if r.kind is RecordKind.METRIC else r for r in again]
    frame = sync_frame(frame_of(rows + again)).query("version == @version and loaded")
    assert frame["transfer_s"].tolist() == [version / 4, 3 * version / 4]
    assert frame["pause_s"].tolist() == [version / 8, 3 * version / 8]


def test_the_worlds_take_every_way() -> None:
    """Or the tests above would hold less than they seem to."""
    batches = pd.concat([batches_frame(frame_of(list(records_of(name)[1]))) for name in WORLDS])
    assert set(batches["state"]) == {"trained", "dropped", "failed", "cancelled"}
    assert {"stale", "degenerate", "no_step"} <= set(batches["reason"].dropna())
    assert (batches["parked_s"] > 0).any()
    assert (batches["ready_s"] > 0).any()
    assert (batches["consumed_at_s"].notna() & batches["queued_at_s"].isna()).any()
    assert (batches["staleness_in_queue"] > 0).any()
    assert (batches["staleness_at_start"] > 0).any()
    syncs = pd.concat([sync_frame(frame_of(list(records_of(name)[1]))) for name in WORLDS])
    assert (~syncs["loaded"]).any()
    assert (syncs["lag"] > 0).any()
    assert (syncs["drain_s"] > 0).any()


def test_frames_say_what_the_simulator_says() -> None:
    config = SchedulerConfig(max_steps=80, workers=3, engines=3, admission="greedy", max_staleness=2)
    result = simulate(config, durations=Durations.of(rollout_s=1.3, train_s=0.5, sync_s=0.2), seed=9)
    events = result.events()
    batches, staleness = batches_frame(events), staleness_frame(events)
    trained = staleness[staleness["state"] == "trained"]
    assert Counter(trained["staleness"]) == result.staleness
    assert len(batches) == result.batches["admitted"]
    assert len(steps_frame(events)) == result.steps
    assert residency_frame(events)["time_s"].groupby(
        residency_frame(events)["entity"], observed=True
    ).sum().to_numpy() == pytest.approx(result.wall_s)
    shares = result.shares
    assert shares is not None
    spent = residency_frame(events).query("machine == 'trainer' and state == 'training'")["time_s"].sum()
    assert spent / shares.window_s == pytest.approx(shares.trainer_states["training"])


def test_synchronous_run_by_hand() -> None:
    """Durations in ms: generate 100, reward 5, train 60, export 4, load 3. A step is 165 ms, and 7 ms of sync."""
    config = SchedulerConfig(max_steps=20, max_staleness=0)
    events = frame_of(virtual_run(config))
    steps = steps_frame(events)
    assert steps["interval_s"].tolist() == pytest.approx([0.165, *[0.172] * 19])
    assert steps["waiting_generation_s"].tolist() == pytest.approx([0.1] * 20)
    assert steps["waiting_reward_s"].tolist() == pytest.approx([0.005] * 20)
    assert steps["waiting_weight_sync_s"].tolist() == pytest.approx([0.0, *[0.003] * 19])
    assert steps["syncing_s"].tolist() == pytest.approx([0.0, *[0.004] * 19])
    assert steps["training_s"].tolist() == pytest.approx([0.06] * 20)
    syncs = sync_frame(events)
    assert syncs["version"].tolist() == list(range(20))
    assert syncs["load_s"].tolist() == pytest.approx([0.003] * 20)
    assert syncs["export_s"].tolist() == pytest.approx([0.004] * 20)
    assert syncs["publish_s"].tolist()[1:] == pytest.approx([0.007] * 19)
    assert syncs["closed_s"].tolist()[1:] == pytest.approx([0.007] * 19)
    batches = batches_frame(events)
    assert (batches["staleness"] == 0).all()
    assert batches["generating_s"].tolist() == pytest.approx([0.1] * 20)


@pytest.mark.parametrize("name", FRAMES)
def test_columns_are_the_documented_ones(name: str) -> None:
    _, records = records_of("greedy, drops")
    frame = FRAMES[name](frame_of(list(records)))
    metrics = ["reward_mean", "tokens", "ratio_mean", "approx_kl", "eval/reward"] if name == "steps_frame" else []
    assert [*frame.columns] == [*COLUMNS[name], *metrics]
    for column, (unit, meaning) in COLUMNS[name].items():
        assert meaning
        kind = frame[column].dtype.kind
        if unit.startswith("s"):
            assert kind == "f", column
            assert column.endswith("_s") == (unit != "share"), column
        elif unit in ("tokens", "optimiser steps"):
            assert kind == "i", column


def test_the_page_has_the_columns() -> None:
    page = DOCS.read_text(encoding="utf-8")
    assert page == with_tables(page), "run `make docs`"
    for name, columns in COLUMNS.items():
        section = page.split(f"### `{name}`")[1].split("###")[0]
        assert re.findall(r"^\| `(\w+)` \|", section, flags=re.M) == list(columns)


@pytest.mark.parametrize("name", FRAMES)
def test_every_form_of_a_run_gives_the_same(name: str, tmp_path: Path) -> None:
    config, records = records_of("paced, own engines, saves")
    run = log_of(tmp_path, list(records), config)
    expected = FRAMES[name](run)
    for form in (str(run), run / "events.arrows", read_log(run), load_events(run)):
        pd.testing.assert_frame_equal(FRAMES[name](form), expected)


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_a_compacted_log_gives_the_same(form: str, tmp_path: Path) -> None:
    config, records = records_of("lockstep")
    run = log_of(tmp_path, list(records), config)
    expected = {name: frame_of_run(run) for name, frame_of_run in FRAMES.items()}
    assert main(["compact", str(run), "--to", form]) == 0
    for name, frame in expected.items():
        pd.testing.assert_frame_equal(FRAMES[name](run), frame)


def test_a_log_of_the_first_schema_is_read() -> None:
    """It has no numerators."""
    run = GOLDEN / "schema-1.0" / "paced"
    for frame_of_run in FRAMES.values():
        frame = frame_of_run(run)
        assert len(frame) > 0
        pd.testing.assert_frame_equal(frame_of_run(load_events(run)), frame)
    costs = sync_frame(run)[["pause_s", "transfer_s", "resume_s", "nbytes"]]
    assert costs.isna().all(axis=None), "nor what a load cost"
    assert costs.dtypes.astype(str).tolist() == ["float64"] * 3 + ["Int64"]


@pytest.mark.parametrize("name", FRAMES)
def test_a_log_cut_anywhere_gives_what_there_is(name: str) -> None:
    _, records = records_of("paced")
    events = frame_of(list(records))
    whole = FRAMES[name](events)
    for count in (0, 1, 2, 7, 20, 33, 47, 60, 101):
        frame = FRAMES[name](events.iloc[:count])
        assert [*frame.columns][: len(COLUMNS[name])] == [*COLUMNS[name]]
        assert [frame[c].dtype.kind for c in COLUMNS[name]] == [whole[c].dtype.kind for c in COLUMNS[name]]
    started = FRAMES["batches_frame"](events.iloc[:60])
    assert (started["state"] == "open").any()


def test_events_are_loaded_whole_or_some_columns_of_them(tmp_path: Path) -> None:
    config, records = records_of("paced")
    run = log_of(tmp_path, list(records), config)
    some = load_events(run, columns=["value", "t_ns"])
    assert list(some.columns) == ["seq", "t_ns", "kind", "value"]
    pd.testing.assert_frame_equal(some, load_events(run)[list(some.columns)])
    with pytest.raises(ValueError, match="has no column 'price', expected some of seq, t_ns"):
        load_events(run, columns=["price"])
    with pytest.raises(ValueError, match=r"the events lack batch_id, dest, .*; load them whole"):
        batches_frame(some)


def test_a_frame_that_is_no_log_is_refused() -> None:
    with pytest.raises(ValueError, match="expected those of an event log"):
        batches_frame(pd.DataFrame({"a": [1]}))


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan")])
def test_window_of_no_time_is_refused(window_s: float) -> None:
    with pytest.raises(ValueError, match="expected seconds above 0"):
        residency_frame(frame_of(list(records_of("paced")[1])), window_s)
