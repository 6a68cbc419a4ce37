"""The live view's snapshot at any row against the same worked out from the records before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from fsm_trainer.analysis.causes import CAUSES
from fsm_trainer.analysis.live import COLUMNS, LiveRun
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.writer import to_batch
from tests.replay.virtual_run import virtual_run

CONFIG = SchedulerConfig(max_steps=30, workers=2, engines=2, max_staleness=1)
ROWS = virtual_run(CONFIG, degenerate={3}, no_step={5}, metrics=True)


def taken(rows: list[Record], size: int = 10_000) -> LiveRun:
    run = LiveRun(CONFIG.to_dict())
    for start in range(0, len(rows), size):
        run.take(pa.table(to_batch(rows[start : start + size])).select(list(COLUMNS)))
    return run


def by_hand(rows: list[Record], now_ns: int) -> list[tuple[str, str, str | None, float]]:
    """Machine -> state, cause and for how long, straight from the rows."""
    here: dict[str, tuple[str, str | None, int]] = {}
    for r in rows:
        if r.kind not in ("transition", "wait") or r.machine == "batch":
            continue
        assert r.entity is not None
        state, _, since = here.get(r.entity, (str(r.source), None, rows[0].t_ns))
        here[r.entity] = (str(r.dest), None, r.t_ns) if r.kind == "transition" else (state, r.reason, since)
    return sorted((name, state, cause, (now_ns - since) / 1e9) for name, (state, cause, since) in here.items())


@pytest.mark.parametrize("count", [1, 12, 100, 333, 700, len(ROWS)])
@pytest.mark.parametrize("size", [10_000, 7])
def test_snapshot_at_any_row(count: int, size: int) -> None:
    rows = ROWS[:count]
    now = rows[-1].t_ns + 1_500_000_000
    s = taken(rows, size).snapshot(now)
    found = sorted((m["machine"], m["state"], m["cause"], m["for_s"]) for m in s["machines"])
    assert found == by_hand(rows, now)
    steps = [r for r in rows if r.kind == "version" and r.trigger == "step"]
    assert s["step"] == s["train_version"] == len(steps)
    queue = [r.queue_len for r in rows if r.kind == "queue"]
    assert s["queue"] == {"length": queue[-1] if queue else 0, "size": 2}
    loads = {str(r.engine): r.rollout_version_last for r in rows if r.kind == "version" and r.trigger == "load"}
    assert s["rollout_versions"] == loads
    ends = [r for r in rows if r.kind == "transition" and r.machine == "batch"]
    trained = Counter(str(r.staleness) for r in ends if r.dest == "trained")
    assert s["staleness"] == trained
    assert s["batches"].get("dropped", 0) == sum(r.dest == "dropped" for r in ends)
    assert s["events"] == count
    assert s["elapsed_s"] == (now - rows[0].t_ns) / 1e9


def test_order_and_words() -> None:
    s = taken(ROWS[:400]).snapshot(ROWS[399].t_ns)
    assert [m["machine"] for m in s["machines"]] == ["run", "trainer", "rollout-0", "rollout-1", "engine-0", "engine-1"]
    causes = {r.reason for r in ROWS if r.kind == "wait"}
    assert causes <= set(CAUSES)
    waiting = [m for m in s["machines"] if m["cause"]]
    assert waiting
    assert all(m["waits"] == CAUSES[m["cause"]] for m in waiting)


def test_rates_are_those_of_the_newest_minute() -> None:
    """A step each 70 s of a slow run, then 100 quick ones: 1 step a second over the last minute is 60 of them."""
    run, base = LiveRun(CONFIG.to_dict()), ROWS[0]
    rows = [base._replace(t_ns=0)]
    rows += [Record(i, i * 70_000_000_000, "version", trigger="step", train_version=i) for i in range(1, 4)]  # type: ignore[arg-type]
    quick = rows[-1].t_ns
    rows += [
        Record(i + 3, quick + i * 1_000_000_000, "version", trigger="step", train_version=i + 3)  # type: ignore[arg-type]
        for i in range(1, 101)
    ]
    run.take(pa.table(to_batch(rows)).select(list(COLUMNS)))
    assert run.snapshot(rows[-1].t_ns)["steps_per_s"] == pytest.approx(1.0, rel=0.02)
    # Half a minute without a step.
    assert run.snapshot(rows[-1].t_ns + 30_000_000_000)["steps_per_s"] == pytest.approx(0.5, rel=0.04)
    assert run.snapshot(rows[-1].t_ns + 90_000_000_000)["steps_per_s"] == 0.0


def test_drops_errors_and_the_end() -> None:
    s = taken(ROWS).snapshot(ROWS[-1].t_ns)
    drops = [r for r in ROWS if r.kind == "drop"]
    assert [(d["batch"], d["reason"]) for d in s["drops"]] == [(r.batch_id, r.reason) for r in drops]
    assert (s["outcome"], s["message"], s["errors"]) == ("completed", "max_steps reached", [])
    failed: list[Any] = virtual_run(CONFIG, fail_generation_of=4)
    s = taken(failed).snapshot(failed[-1].t_ns)
    assert s["outcome"] == "failed"
    assert [(e["what"], e["reason"], e["message"]) for e in s["errors"]] == [("failed", "RuntimeError", "no memory")]
