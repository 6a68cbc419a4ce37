"""What is known of a run at a moment, kept up row by row while the log grows; for a live view.

Takes rows and gives a plain snapshot; reads no file and no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.analysis.causes import CAUSES
from fsm_trainer.analysis.entities import BATCH_ENDS, place_of

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
    "rollout_version_last",
    "train_version",
    "staleness",
    "queue_len",
    "tokens",
    "value",
    "reason",
    "message",
)
"""Columns of the log that it needs."""
RATE_WINDOW_S = 60.0
"""Rates are those of this much of the newest time."""
_KEPT = 5
"""Newest drops and errors shown."""
_METRICS = ("reward_mean", "loss")
_FAILURES = ("failed", "engine_died", "stop")
Row = dict[str, Any]


@dataclass
class _Machine:
    kind: str
    state: str
    since_ns: int
    cause: str | None = None
    batch: int | None = None


class LiveRun:
    """One run as far as its rows have been taken."""

    def __init__(self, scheduler_config: dict[str, Any]) -> None:
        """The configuration says how long the queue may be, and how many steps are wanted."""
        self._config = scheduler_config
        self._machines: dict[str, _Machine] = {}
        self._batches: Counter[str] = Counter()
        self._staleness: Counter[int] = Counter()
        self._drops: deque[Row] = deque(maxlen=_KEPT)
        self._errors: deque[Row] = deque(maxlen=_KEPT)
        self._steps: deque[int] = deque()
        self._tokens: deque[tuple[int, int]] = deque()
        self._versions: dict[int, int] = {}
        self._metrics: dict[str, float] = {}
        self._end: Row | None = None
        self._first_ns = self._running_ns = self.last_ns = 0
        self.events = self._queue_len = self._train_version = 0

    def take(self, table: pa.Table) -> None:
        """The next rows of the log, in order, with `COLUMNS`."""
        if not table.num_rows:
            return
        if not self.events:
            self._first_ns = self._running_ns = table["t_ns"][0].as_py()
        self.events += table.num_rows
        self.last_ns = table["t_ns"][-1].as_py()
        unseen = (pc.field("kind") == "metric") & ~pc.field("reason").isin(_METRICS)
        dull = (pc.field("kind") == "input") & ~pc.field("trigger").isin(_FAILURES)
        shown = table.filter(~(unseen | dull | pc.field("kind").isin(["command", "checkpoint", "ignored", "sync"])))
        columns = {name: shown[name].to_pylist() for name in COLUMNS}
        for values in zip(*columns.values(), strict=True):
            self._row(dict(zip(columns, values, strict=True)))

    def snapshot(self, now_ns: int) -> dict[str, Any]:
        """Everything a view shows, JSON-ready; times in seconds, `now_ns` on the run's clock."""
        self._forget(now_ns)
        window = max(min(RATE_WINDOW_S, (now_ns - self._running_ns) / 1e9), 1e-9)
        return {
            "run": self._state("run", "starting"),
            "outcome": None if self._end is None else self._end["reason"],
            "message": None if self._end is None else self._end["message"],
            "elapsed_s": (now_ns - self._first_ns) / 1e9,
            "events": self.events,
            "step": self._train_version,
            "max_steps": self._config.get("max_steps"),
            "steps_per_s": len(self._steps) / window,
            "tokens_per_s": sum(tokens for _, tokens in self._tokens) / window,
            "metrics": dict(self._metrics),
            "queue": {"length": self._queue_len, "size": self._config.get("queue_size")},
            "train_version": self._train_version,
            "rollout_versions": {str(engine): version for engine, version in sorted(self._versions.items())},
            "batches": dict(self._batches),
            "staleness": {str(value): count for value, count in sorted(self._staleness.items())},
            "machines": [self._shown(name, machine, now_ns) for name, machine in self._in_order()],
            "drops": [self._event(row) for row in self._drops],
            "errors": [self._event(row) for row in self._errors],
        }

    def _in_order(self) -> list[tuple[str, _Machine]]:
        return sorted(self._machines.items(), key=lambda item: place_of(item[1].kind, item[0]))

    def _row(self, row: Row) -> None:
        kind = row["kind"]
        if kind == "transition":
            self._move(row)
        elif kind == "wait":
            machine = self._machine(row)
            machine.cause = row["reason"]
        elif kind == "queue":
            self._queue_len = row["queue_len"]
        elif kind == "version":
            self._version(row)
        elif kind == "metric":
            self._metrics[row["reason"]] = row["value"]
        elif kind == "drop":
            self._drops.append(row)
        elif kind == "run_end":
            self._end = row
        else:
            self._errors.append(row)

    def _move(self, row: Row) -> None:
        if row["machine"] == "batch":
            self._batch(row)
            return
        machine = self._machine(row)
        machine.state, machine.since_ns, machine.cause = row["dest"], row["t_ns"], None
        if row["machine"] in ("rollout", "trainer"):
            idle = row["dest"] in ("idle", "waiting", "stopped")
            machine.batch = None if idle else row["batch_id"] if row["batch_id"] is not None else machine.batch
        if row["machine"] == "rollout" and row["trigger"] == "admit":
            self._batches["admitted"] += 1
        if row["machine"] == "run" and row["dest"] == "running":
            self._running_ns = row["t_ns"]

    def _batch(self, row: Row) -> None:
        if row["trigger"] == "generated" and row["tokens"]:
            self._tokens.append((row["t_ns"], row["tokens"]))
        if row["dest"] in BATCH_ENDS:
            self._batches[row["dest"]] += 1
            if row["dest"] == "trained" and row["staleness"] is not None:
                self._staleness[row["staleness"]] += 1

    def _version(self, row: Row) -> None:
        if row["trigger"] == "step":
            self._train_version = row["train_version"]
            self._steps.append(row["t_ns"])
        else:
            self._versions[row["engine"]] = row["rollout_version_last"]

    def _machine(self, row: Row) -> _Machine:
        found = self._machines.get(row["entity"])
        if found is None:
            found = self._machines[row["entity"]] = _Machine(row["machine"], row["source"], self._first_ns)
        return found

    def _state(self, name: str, unknown: str) -> str:
        return self._machines[name].state if name in self._machines else unknown

    def _forget(self, now_ns: int) -> None:
        """Let go of what no rate counts any more."""
        old = now_ns - int(RATE_WINDOW_S * 1e9)
        while self._steps and self._steps[0] < old:
            self._steps.popleft()
        while self._tokens and self._tokens[0][0] < old:
            self._tokens.popleft()

    def _shown(self, name: str, machine: _Machine, now_ns: int) -> dict[str, Any]:
        waits = None if machine.cause is None else CAUSES.get(machine.cause, f"for {machine.cause.replace('_', ' ')}")
        return {
            "machine": name,
            "state": machine.state,
            "for_s": max(0, now_ns - machine.since_ns) / 1e9,
            "cause": machine.cause,
            "waits": waits,
            "batch": machine.batch,
        }

    def _event(self, row: Row) -> dict[str, Any]:
        return {
            "at_s": (row["t_ns"] - self._first_ns) / 1e9,
            "what": row["trigger"] or row["kind"],
            "batch": row["batch_id"],
            "staleness": row["staleness"],
            "reason": row["reason"],
            "message": row["message"],
        }
