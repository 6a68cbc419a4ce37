"""A run as a Chrome trace: what each machine did when, which batch went where, and how the queue and versions moved.

One pass over the log in constant memory beside it. Tracks: the loop, the trainer, each rollout worker, each engine. A
visit of a state is a slice; within a wait, each cause is a slice of its own below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.analysis.entities import place_of
from fsm_trainer.analysis.trace_json import Args, TraceWriter
from fsm_trainer.eventlog.reader import EventLog

_KINDS = ("transition", "wait", "version", "queue", "drop", "sync", "checkpoint", "ignored", "run_end")
_INPUTS = ("generated", "failed", "engine_died", "stop", "tick")
COLUMNS = (
    "seq",
    "t_ns",
    "kind",
    "machine",
    "entity",
    "trigger",
    "source",
    "dest",
    "batch_id",
    "engine",
    "rollout_version_first",
    "rollout_version_last",
    "train_version",
    "staleness",
    "queue_len",
    "tokens",
    "started_ns",
    "finished_ns",
    "reason",
    "message",
)
"""Columns of the log that it needs."""
_LOOP = "loop"
Row = dict[str, Any]


@dataclass
class _Visit:
    """A machine in a state, until it leaves it."""

    state: str
    since_ns: int
    entered: Row | None = None
    waits: list[tuple[str, int]] = field(default_factory=list)
    """Causes to wait for, each with its beginning."""
    generated: tuple[str, int] | None = None
    """Of a train step: track and beginning of its batch's generation."""


def pick(table: pa.Table) -> pa.Table:
    """What of a stretch of the log can show, while it is read: no more is kept in memory.

    Inputs stay, so that each moment of the log has a row.
    """
    return table.filter(~pc.field("kind").isin(["metric", "command"]) & ~pc.field("machine").isin(["batch"]))


def write_timeline(log: EventLog, out: TextIO) -> dict[str, int]:
    """Write the trace of a log; returns how many slices, instants, counters and flows it holds.

    ValueError if the log holds no event.
    """
    if not log.table.num_rows:
        raise ValueError(f"{log.path} holds no event, so there is no timeline")
    first, last = (int(log.table["t_ns"][at].as_py()) for at in (0, log.table.num_rows - 1))
    walk = _Walk(TraceWriter(out, f"fsm_trainer {log.path.parent.name}", first), first)
    for place, name in enumerate(_tracks(log.table)):
        walk.trace.track(name, place)
    for row in _rows(log.table):
        walk.take(row)
    walk.end(last)
    return {name: walk.trace.counts[name] for name in ("slices", "instants", "counters", "flows")}


def _tracks(table: pa.Table) -> list[str]:
    """The loop and every machine but the batches, in order."""
    known = table.filter(pc.field("machine").isin(["trainer", "rollout", "engine"]) & pc.field("kind").isin(_KINDS))
    pairs = known.select(["machine", "entity"]).group_by(["machine", "entity"]).aggregate([]).to_pylist()
    # Syncs and drops are marked on the trainer's though they may name no machine.
    named = {"trainer": "trainer", **{row["entity"]: row["machine"] for row in pairs if row["entity"]}}
    return [_LOOP, *sorted(named, key=lambda entity: place_of(named[entity], entity))]


def _rows(table: pa.Table) -> Iterator[Row]:
    """The rows that show, in order: not the inputs that only lead to them, nor commands, metrics and batches' moves."""
    is_input = (pc.field("kind") == "input") & pc.field("trigger").isin(_INPUTS)
    moves = pc.field("kind").isin(_KINDS) & ~pc.field("machine").isin(["batch"])
    shown = table.select(list(COLUMNS)).filter(is_input | moves)
    for batch in shown.to_batches(max_chunksize=8192):
        columns = [column.to_pylist() for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(COLUMNS, values, strict=True))


class _Walk:
    """One pass over the rows, with the state that each machine is in."""

    def __init__(self, trace: TraceWriter, start_ns: int) -> None:
        self.trace = trace
        self._start_ns = start_ns
        self._visits: dict[str, _Visit] = {}
        self._generated: dict[int, tuple[str, int]] = {}
        """Batch -> track and beginning of its generation, until it is consumed."""
        self._last_input: Row = {}

    def take(self, row: Row) -> None:
        """Draw what one row says."""
        kind = row["kind"]
        if kind == "transition":
            self._move(row)
        elif kind == "wait":
            self._visit(row).waits.append((row["reason"], row["t_ns"]))
        elif kind == "input":
            self._last_input = row
            if row["trigger"] != "generated":
                self._mark(_LOOP, row["trigger"], row)
        elif kind == "queue":
            self.trace.counter("queue length", row["t_ns"], row["queue_len"])
        elif kind == "version":
            self._version(row)
        else:
            self._event(kind, row)

    def end(self, end_ns: int) -> None:
        """Draw what was still going on at the log's end, and end the trace."""
        for track, visit in self._visits.items():
            self._draw(track, visit, end_ns)
        self.trace.close()

    def _visit(self, row: Row) -> _Visit:
        """The visit that a machine's row finds it in: before its first row it was where that row finds it."""
        track = _track(row)
        if track not in self._visits:
            self._visits[track] = _Visit(row["source"], self._start_ns)
        return self._visits[track]

    def _move(self, row: Row) -> None:
        track, now = _track(row), row["t_ns"]
        visit = self._visit(row)
        self._draw(track, visit, now)
        if visit.state == "generating" and row["trigger"] == "generated":
            self._generated[row["batch_id"]] = (track, visit.since_ns)
            self._tokens(track)
        if row["machine"] == "trainer" and row["staleness"] is not None:
            self.trace.counter("staleness", now, row["staleness"])
        arrived = self._visits[track] = _Visit(row["dest"], now, row)
        if row["dest"] == "training":
            # None for a batch that came from outside the run.
            arrived.generated = self._generated.pop(row["batch_id"], None)

    def _draw(self, track: str, visit: _Visit, end_ns: int) -> None:
        """The slice of a visit that is over, its causes below it, and the arrow that ends in it."""
        self.trace.begin(track, visit.state, visit.since_ns, _visit_args(visit))
        for place, (cause, since) in enumerate(visit.waits, start=1):
            until = visit.waits[place][1] if place < len(visit.waits) else end_ns
            self.trace.begin(track, f"wait: {cause}", since, (("cause", cause),))
            self.trace.end(track, until)
        self.trace.end(track, end_ns)
        if visit.generated is not None and visit.entered is not None:
            batch = visit.entered["batch_id"]
            self.trace.flow(batch, f"batch {batch}", *visit.generated, track, visit.since_ns)

    def _tokens(self, track: str) -> None:
        """The rate of a generation, while it lasted."""
        done = self._last_input
        tokens, began, ended = done.get("tokens"), done.get("started_ns"), done.get("finished_ns")
        if tokens is None or began is None or ended is None or ended <= began:
            return
        self.trace.counter(f"{track} tokens/s", began, tokens / (ended - began) * 1e9)
        self.trace.counter(f"{track} tokens/s", ended, 0)

    def _version(self, row: Row) -> None:
        if row["trigger"] == "step":
            self.trace.counter("train version", row["t_ns"], row["train_version"])
        else:
            self.trace.counter(f"engine-{row['engine']} version", row["t_ns"], row["rollout_version_last"])

    def _event(self, kind: str, row: Row) -> None:
        if kind == "sync":
            self._mark(row["entity"] or "trainer", f"sync {row['trigger']}", row)
        elif kind == "drop":
            self._generated.pop(row["batch_id"], None)
            self._mark("trainer", f"drop: {row['reason']}", row)
        elif kind == "checkpoint":
            self._mark("trainer", "checkpoint", row)
        else:
            self._mark(_LOOP, f"{kind}: {row['reason']}", row)

    def _mark(self, track: str, name: str, row: Row) -> None:
        names = ("batch_id", "engine", "rollout_version_first", "rollout_version_last", "train_version", "staleness")
        args: Args = tuple((name, row[name]) for name in (*names, "reason", "message", "seq"))
        self.trace.instant(track, name, row["t_ns"], args)


def _track(row: Row) -> str:
    return _LOOP if row["machine"] == "run" else str(row["entity"])


def _visit_args(visit: _Visit) -> Args:
    """Batch, version and cause of a visit; `seq` is the row that began it."""
    causes = ", ".join(dict.fromkeys(cause for cause, _ in visit.waits)) or None
    row = visit.entered
    if row is None:
        return (("cause", causes),)
    version = row["rollout_version_first"] if row["machine"] == "rollout" else row["train_version"]
    if row["machine"] == "engine":
        version = row["rollout_version_last"]
    if version is None:
        version = row["train_version"]
    return (
        ("batch", row["batch_id"]),
        ("version", version),
        ("staleness", row["staleness"]),
        ("cause", causes),
        ("trigger", row["trigger"]),
        ("reason", row["reason"]),
        ("seq", row["seq"]),
    )
