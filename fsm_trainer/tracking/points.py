"""The numbers of each optimiser step, made of the log's rows one after the other.

`fsm-replay export` feeds a finished log to it and `--report-to` the rows of a running one, so both give the same.
Nothing here knows who takes the numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fsm_trainer.core.config import SECOND_NS
from fsm_trainer.core.events import Record, RecordKind

KINDS = frozenset(
    {
        RecordKind.INPUT,
        RecordKind.METRIC,
        RecordKind.VERSION,
        RecordKind.TRANSITION,
        RecordKind.WAIT,
        RecordKind.SYNC,
    }
)
"""All that a `PointStream` looks at; other rows may be kept from it."""


@dataclass
class Point:
    """What is known of one train version at one moment: values by name."""

    step: int
    """Optimiser steps taken."""
    t_ns: int
    """Nanoseconds of the run's clock."""
    values: dict[str, float] = field(default_factory=dict)


class PointStream:
    """Makes points of rows that come in the order of the log.

    A point has every metric that was logged at its step, under its name, and what the scheduler's own rows say of it,
    under `run/`: `interval_s` since the step before; `waiting_s` of the trainer in it, and `waiting_CAUSE_s` for each
    cause so far; `staleness`, `staleness_in_flight` and `staleness_in_queue` of its batch; batches `trained` and
    `dropped` so far, and `dropped_REASON`; `publish_lag_engine-N`, the steps that engine N's weights are behind.
    """

    def __init__(self) -> None:
        """Before the first row."""
        self._open: dict[int, Point] = {}
        """By step: what the present input has given so far."""
        self._version = 0
        self._since_ns = 0
        self._waits: dict[str, int] = {}
        self._waiting: tuple[str, int] | None = None
        """The trainer's cause and since when, while it waits."""
        self._first: dict[int, int] = {}
        self._offered: dict[int, int] = {}
        """train_version when a batch was offered to the queue."""
        self._ended: Counter[str] = Counter()
        self._served: dict[int, int] = {}

    def take(self, r: Record) -> list[Point]:
        """Take a row; the points that are whole now."""
        # An input's rows are followed by the metrics that it gave, and those by the next input.
        done = self.close() if r.kind is RecordKind.INPUT else []
        if r.kind is RecordKind.METRIC and r.train_version is not None and r.reason and r.value is not None:
            point = self._open.setdefault(r.train_version, Point(r.train_version, r.t_ns))
            point.values[r.reason] = r.value
        elif r.kind is RecordKind.VERSION:
            self._on_version(r)
        elif r.machine == "batch" and r.kind is RecordKind.TRANSITION and r.batch_id is not None:
            self._on_batch(r, r.batch_id)
        elif r.kind is RecordKind.SYNC and r.trigger == "due" and r.train_version is not None:
            self._version = r.train_version
        elif r.machine == "trainer" and r.kind in (RecordKind.TRANSITION, RecordKind.WAIT):
            self._on_trainer(r)
        elif r.machine == "run" and r.dest == "running":
            self._since_ns, self._waits, self._waiting = r.t_ns, {}, None
        return done

    def close(self) -> list[Point]:
        """The points that wait for more: there is no more."""
        done, self._open = list(self._open.values()), {}
        return done

    def _on_version(self, r: Record) -> None:
        if r.trigger == "load" and r.engine is not None and r.rollout_version_last is not None:
            self._served[r.engine] = r.rollout_version_last
        elif r.trigger == "step" and r.train_version is not None:
            self._version = r.train_version
            self._open[r.train_version] = Point(r.train_version, r.t_ns, self._values(r))
            self._since_ns, self._waits = r.t_ns, dict.fromkeys(self._waits, 0)

    def _values(self, step: Record) -> dict[str, float]:
        values = {"interval_s": (step.t_ns - self._since_ns) / SECOND_NS}
        values["waiting_s"] = sum(self._waits.values()) / SECOND_NS
        values |= {f"waiting_{cause}_s": ns / SECOND_NS for cause, ns in self._waits.items()}
        values |= self._staleness(-1 if step.batch_id is None else step.batch_id)
        dropped = {f"dropped_{reason}": float(count) for reason, count in self._ended.items() if reason != "trained"}
        values |= {"trained": float(self._ended["trained"]), "dropped": float(sum(dropped.values())), **dropped}
        values |= {f"publish_lag_engine-{e}": float(self._version - v) for e, v in sorted(self._served.items())}
        return {f"run/{name}": value for name, value in values.items()}

    def _staleness(self, batch_id: int) -> dict[str, float]:
        if batch_id not in self._first or batch_id not in self._offered:
            return {}
        # The batch was consumed at the version before this step.
        first, offered, consumed = self._first.pop(batch_id), self._offered.pop(batch_id), self._version - 1
        parts = {"staleness_in_flight": offered - first, "staleness_in_queue": consumed - offered}
        return {"staleness": float(consumed - first), **{name: float(part) for name, part in parts.items()}}

    def _on_batch(self, r: Record, batch_id: int) -> None:
        if r.trigger == "generated" and r.rollout_version_first is not None:
            self._first[batch_id] = r.rollout_version_first
        elif r.trigger == "rewarded":
            self._offered[batch_id] = self._version
        elif r.dest == "trained":
            self._ended["trained"] += 1
        elif r.dest in ("dropped", "failed", "cancelled"):
            self._first.pop(batch_id, None)
            self._offered.pop(batch_id, None)
            if r.dest == "dropped":
                self._ended[r.reason or "unknown"] += 1

    def _on_trainer(self, r: Record) -> None:
        """A transition or a new cause ends the wait before it; a cause begins one."""
        if self._waiting is not None:
            cause, since = self._waiting
            self._waits[cause] = self._waits.get(cause, 0) + r.t_ns - since
            self._waiting = None
        if r.kind is RecordKind.WAIT:
            self._waiting = (r.reason or "unknown", r.t_ns)
