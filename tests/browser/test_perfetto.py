"""The trace of a run, loaded by Perfetto's own trace processor and asked in SQL, against the records of the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.analysis import summarize
from fsm_trainer.analysis.timeline import write_timeline
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.reader import read_log
from tests.analysis.test_timeline import visits_by_hand
from tests.browser.trace_processor import trace_processor
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=30, workers=2, engines=2, max_staleness=1, sync_interval=2)


def odd_times(row: Record) -> Record:
    """Times that no floating point number of microseconds holds exactly."""
    names = ("t_ns", "posted_ns", "started_ns", "finished_ns")
    times = {n: getattr(row, n) * 7 // 3 + 12_345_678_901 for n in names if getattr(row, n) is not None}
    return row._replace(**times)


ROWS = list(map(odd_times, virtual_run(CONFIG, degenerate={3}, no_step={5})))
ON_TRACKS = "slice join thread_track on slice.track_id = thread_track.id join thread using (utid)"


@pytest.fixture(scope="module")
def tp(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("trace")
    path = folder / "trace.json"
    with path.open("w", encoding="utf-8") as out:
        write_timeline(read_log(log_of(folder / "run", ROWS, CONFIG)), out)
    with trace_processor(browser, path) as processor:
        yield processor


def rows(tp: Any, sql: str) -> list[tuple[Any, ...]]:
    result = tp.query(sql)
    return [tuple(getattr(row, name) for name in result.column_names) for row in result]


def test_it_loads_without_an_error(tp: Any) -> None:
    assert rows(tp, "select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []
    assert rows(tp, "select count(*) from slice where dur < 0") == [(0,)]


def test_tracks_are_the_machines(tp: Any) -> None:
    found = rows(tp, "select name from thread where utid in (select utid from thread_track) order by name")
    assert [name for (name,) in found] == ["engine-0", "engine-1", "loop", "rollout-0", "rollout-1", "trainer"]


def test_slices_of_each_track_are_the_visits_of_the_log(tp: Any) -> None:
    sql = f"""select thread.name as track, slice.name as name, count(*) as n from {ON_TRACKS}
              where depth = 0 and extract_arg(arg_set_id, 'args.seq') is not null
                 or depth = 0 and slice.ts = (select min(ts) from slice) and dur > 0
              group by 1, 2"""
    visits = visits_by_hand(ROWS)
    found = Counter({(track, name): n for track, name, n in rows(tp, sql)})
    instants = {name for track, name in found} - {name for _, name in visits}
    assert {key: n for key, n in found.items() if key[1] not in instants} == visits


def test_times_are_exact(tp: Any) -> None:
    training = [r for r in ROWS if r.kind == "transition" and r.machine == "trainer"]
    by_hand = [
        (a.t_ns - ROWS[0].t_ns, b.t_ns - a.t_ns)
        for a, b in zip(training, training[1:], strict=False)
        if a.dest == "training"
    ]
    found = rows(tp, f"select ts, dur from {ON_TRACKS} where slice.name = 'training' order by ts")
    assert [(ts - found[0][0], dur) for ts, dur in found] == [(t - by_hand[0][0], dur) for t, dur in by_hand]


def test_flows_are_the_consumed_batches(tp: Any) -> None:
    sql = """select o.name as a, i.name as b, extract_arg(o.arg_set_id, 'args.batch') as x,
                    extract_arg(i.arg_set_id, 'args.batch') as y
             from flow join slice o on flow.slice_out = o.id join slice i on flow.slice_in = i.id"""
    found = rows(tp, sql)
    consumed = [r.batch_id for r in ROWS if r.kind == "transition" and r.machine == "trainer" and r.dest == "training"]
    assert sorted(x for _, _, x, _ in found) == sorted(consumed)
    assert {(a, b) for a, b, *_ in found} == {("generating", "training")}
    assert all(x == y for *_, x, y in found)


def test_counters(tp: Any) -> None:
    sql = """select track.name as name, count(*) as n, max(value) as most from counter
             join counter_track track on counter.track_id = track.id group by 1"""
    found = {name.removesuffix(" value"): (n, most) for name, n, most in rows(tp, sql)}
    assert found["train version"] == (30, 30.0)
    queue = [r.queue_len or 0 for r in ROWS if r.kind == "queue"]
    assert found["queue length"] == (len(queue), max(queue))
    assert {"staleness", "engine-0 version", "engine-1 version", "rollout-0 tokens/s"} <= set(found)


def test_drops_and_syncs_are_instants(tp: Any) -> None:
    found = dict(rows(tp, "select name, count(*) as n from slice where dur = 0 group by 1"))
    for kind in ("drop", "sync"):
        by_hand = Counter(r.trigger if kind == "sync" else r.reason for r in ROWS if r.kind == kind)
        joined = {"sync": "sync {}", "drop": "drop: {}"}[kind]
        assert {what: found[joined.format(what)] for what in by_hand} == by_hand


def test_the_query_of_the_docs_gives_the_residency(tp: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")
    sql = page.split("```sql\n")[1].split("```")[0]
    residency = summarize(log_of(tmp_path / "run", ROWS, CONFIG)).residency
    by_hand: Counter[str] = Counter()
    for row in residency:
        by_hand[row.cause or ""] += row.ns
    del by_hand[""]
    found = {cause: seconds for cause, seconds in rows(tp, sql) if seconds}
    assert found == pytest.approx({cause: ns / 1e9 for cause, ns in by_hand.items()})
