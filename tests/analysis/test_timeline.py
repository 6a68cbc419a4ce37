"""The trace of a run against its records, read by a parser of its own that knows the Chrome format's rules.

tests/browser/test_perfetto.py loads it with Perfetto itself.
"""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from fsm_trainer.analysis.timeline import COLUMNS, pick, write_timeline
from fsm_trainer.cli.replay import main
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.reader import read_log
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=8, workers=2, engines=2, max_staleness=1, sync_interval=2, save_interval=3)
ROWS = virtual_run(CONFIG, degenerate={3}, no_step={5}, metrics=True)


@dataclass
class Trace:
    """A parsed trace; times in nanoseconds."""

    slices: dict[str, list[tuple[int, str, int, int, dict[str, Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By track: depth, name, begin, end, args."""
    instants: list[tuple[str, str, int]] = field(default_factory=list)
    counters: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    flows: dict[int, list[tuple[str, str, int]]] = field(default_factory=lambda: defaultdict(list))
    """By id: phase, track, moment."""


def parse(text: str) -> Trace:
    """Parse strictly: events by time, equal times in the file's order; every begin has its end."""
    events = json.loads(text, parse_float=Decimal)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert len(set(names.values())) == len(names)
    trace, open_slices = Trace(), defaultdict(list)
    timed = [e for e in events if e["ph"] != "M"]
    for e in sorted(timed, key=lambda e: Decimal(e["ts"])):
        at, track = int(Decimal(e["ts"]) * 1000), names.get(e.get("tid"), "")
        if e["ph"] == "B":
            open_slices[track].append((e["name"], at, e.get("args", {})))
        elif e["ph"] == "E":
            name, begin, args = open_slices[track].pop()
            trace.slices[track].append((len(open_slices[track]), name, begin, at, args))
        elif e["ph"] == "i":
            trace.instants.append((track, e["name"], at))
        elif e["ph"] == "C":
            trace.counters[e["name"]].append((at, float(e["args"]["value"])))
        else:
            assert e["ph"] in "sf", e
            trace.flows[e["id"]].append((e["ph"], track, at))
    assert not any(open_slices.values())
    return trace


def trace_of(path: Path, rows: list[Record], config: SchedulerConfig = CONFIG) -> Trace:
    out = io.StringIO()
    log_of(path, rows, config)
    write_timeline(read_log(path), out)
    picked = io.StringIO()
    write_timeline(read_log(path, columns=COLUMNS, take=pick), picked)
    assert picked.getvalue() == out.getvalue(), "what is not picked does not show"
    return parse(out.getvalue())


def visits_by_hand(rows: list[Record]) -> Counter[tuple[str, str]]:
    """(track, state) -> visits: one for each arrival, and one for where each machine was found first."""
    found: Counter[tuple[str, str]] = Counter()
    seen = set()
    for r in rows:
        if r.kind not in ("transition", "wait") or r.machine == "batch":
            continue
        track = "loop" if r.machine == "run" else str(r.entity)
        if track not in seen:
            seen.add(track)
            found[track, str(r.source)] += 1
        if r.kind == "transition":
            found[track, str(r.dest)] += 1
    return found


def test_a_slice_for_each_visit_and_each_wait(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROWS)
    visits = Counter((t, name) for t, found in trace.slices.items() for depth, name, *_ in found if depth == 0)
    assert visits == visits_by_hand(ROWS)
    waits = Counter((t, name) for t, found in trace.slices.items() for depth, name, *_ in found if depth == 1)
    assert waits == Counter((r.entity, f"wait: {r.reason}") for r in ROWS if r.kind == "wait")
    assert max(depth for found in trace.slices.values() for depth, *_ in found) == 1


def test_visits_fill_each_track_without_gap_or_overlap(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROWS)
    end = ROWS[-1].t_ns - ROWS[0].t_ns
    assert set(trace.slices) == {"loop", "trainer", "rollout-0", "rollout-1", "engine-0", "engine-1"}
    for track, found in trace.slices.items():
        visits = [(begin, until) for depth, _, begin, until, _ in found if depth == 0]
        assert visits[0][0] == 0
        assert visits[-1][1] == end
        assert all(a[1] == b[0] for a, b in zip(visits, visits[1:], strict=False)), track


def test_odd_nanoseconds_are_exact(tmp_path: Path) -> None:
    rows = [r._replace(t_ns=12_345_678_901 + r.t_ns + r.t_ns // 1_000_000 % 89) for r in ROWS]
    trace = trace_of(tmp_path, rows)
    for track, found in trace.slices.items():
        moves = [r.t_ns - rows[0].t_ns for r in rows if r.kind == "transition" and r.entity == track]
        visits = [(begin, until) for depth, _, begin, until, _ in found if depth == 0]
        assert [begin for begin, _ in visits[1:]] == moves or track == "loop"
        assert all(a[1] == b[0] for a, b in zip(visits, visits[1:], strict=False))


def test_args_say_batch_version_and_cause(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROWS)
    steps = [r for r in ROWS if r.kind == "transition" and r.entity == "trainer" and r.dest == "training"]
    trained = [args for _, name, _, _, args in trace.slices["trainer"] if name == "training"]
    assert [a["batch"] for a in trained] == [r.batch_id for r in steps]
    assert [a["version"] for a in trained] == [r.train_version for r in steps]
    assert [a["staleness"] for a in trained] == [r.staleness for r in steps]
    starts = [r for r in ROWS if r.kind == "transition" and r.entity == "rollout-1" and r.dest == "generating"]
    generated = [args for _, name, _, _, args in trace.slices["rollout-1"] if name == "generating"]
    expected = [(r.batch_id, r.rollout_version_first, r.seq) for r in starts]
    assert [(a["batch"], a["version"], a["seq"]) for a in generated] == expected
    waiting = [args for depth, name, _, _, args in trace.slices["trainer"] if depth == 0 and name == "waiting"]
    assert waiting[0] == {"cause": "starting"}
    assert any("generation" in args.get("cause", "") for args in waiting[1:])


def test_an_arrow_from_generation_to_the_step_that_consumed_it(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROWS)
    consumed = [r.batch_id for r in ROWS if r.kind == "transition" and r.machine == "trainer" and r.dest == "training"]
    assert sorted(trace.flows) == sorted(consumed)
    for batch, ends in trace.flows.items():
        (start, source, at), (end, target, until) = ends
        assert (start, end, target) == ("s", "f", "trainer")
        generating = [s for s in trace.slices[source] if s[1] == "generating" and s[4]["batch"] == batch]
        training = [s for s in trace.slices["trainer"] if s[1] == "training" and s[4]["batch"] == batch]
        assert (generating[0][2], training[0][2]) == (at, until)
        assert generating[0][3] <= until


def test_instants_and_counters(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ROWS)
    origin = ROWS[0].t_ns
    syncs = [(r.entity or "trainer", f"sync {r.trigger}", r.t_ns - origin) for r in ROWS if r.kind == "sync"]
    assert [i for i in trace.instants if i[1].startswith("sync ")] == syncs
    drops = [("trainer", f"drop: {r.reason}", r.t_ns - origin) for r in ROWS if r.kind == "drop"]
    assert len(drops) == 2
    assert [i for i in trace.instants if i[1].startswith("drop")] == drops
    assert [i[1] for i in trace.instants].count("checkpoint") == sum(r.kind == "checkpoint" for r in ROWS)
    assert trace.instants[-1][1] == "run_end: completed"
    queue = [(r.t_ns - origin, float(r.queue_len or 0)) for r in ROWS if r.kind == "queue"]
    assert trace.counters["queue length"] == queue
    assert [v for _, v in trace.counters["train version"]] == [float(i) for i in range(1, 9)]
    loads = [r.rollout_version_last for r in ROWS if r.kind == "version" and r.engine == 1]
    assert [v for _, v in trace.counters["engine-1 version"]] == loads
    stale = [r.staleness for r in ROWS if r.kind == "transition" and r.machine == "trainer" and r.staleness is not None]
    assert [v for _, v in trace.counters["staleness"]] == stale
    # 640 tokens in 100 ms.
    assert set(trace.counters["rollout-0 tokens/s"]) >= {(trace.counters["rollout-0 tokens/s"][0][0], 6400.0)}
    assert {v for _, v in trace.counters["rollout-0 tokens/s"]} == {6400.0, 0.0}


def test_failures_show(tmp_path: Path) -> None:
    config = SchedulerConfig(max_steps=9)
    trace = trace_of(tmp_path, virtual_run(config, fail_generation_of=4), config)
    assert ("loop", "failed") in {(track, name) for track, name, _ in trace.instants}
    assert [name for depth, name, *_ in trace.slices["rollout-0"] if depth == 0][-1] == "failed"
    assert trace.instants[-1][1] == "run_end: failed"


@pytest.mark.parametrize("size", [1, 2, 5, 37, 111, 222])
def test_a_cut_log_has_a_timeline(tmp_path: Path, size: int) -> None:
    trace = trace_of(tmp_path, ROWS[:size])
    if size > 2:
        assert max(s[3] for found in trace.slices.values() for s in found) == ROWS[size - 1].t_ns - ROWS[0].t_ns


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = log_of(tmp_path / "run", ROWS, CONFIG)
    assert main(["timeline", str(run)]) == 0
    assert str(run / "trace.json") in capsys.readouterr().out
    plain = (run / "trace.json").read_text(encoding="utf-8")
    packed = tmp_path / "packed.json.gz"
    assert main(["timeline", str(run), "-o", str(packed), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert gzip.decompress(packed.read_bytes()).decode() == plain
    trace = parse(plain)
    assert found == {
        "path": str(packed),
        "bytes": packed.stat().st_size,
        "slices": sum(map(len, trace.slices.values())),
        "instants": len(trace.instants),
        "counters": sum(map(len, trace.counters.values())),
        "flows": len(trace.flows),
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}"], "is not a run directory"),
        (["{run}", "-o", "{tmp}"], "is a folder"),
        (["{run}", "-o", "{tmp}/none/trace.json"], "cannot be written: No such file or directory"),
        (["{run}", "-o", "{run}/events.arrows/x"], "cannot be written: Not a directory"),
        (["{empty}"], "holds no event"),
    ],
)
def test_bad_usage_is_2_and_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    run, empty = log_of(tmp_path / "run", ROWS, CONFIG), log_of(tmp_path / "empty", [], CONFIG)
    assert main(["timeline", *(a.format(tmp=tmp_path, run=run, empty=empty) for a in arguments)]) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert message in output.err
