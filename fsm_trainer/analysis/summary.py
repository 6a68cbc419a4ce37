"""One run in numbers: how it ended, what became of its batches, where its time went.

Computes from the event log alone; `analysis.summary_text` renders it for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fsm_trainer.analysis import frames, overlap
from fsm_trainer.analysis.entities import BATCH_ENDS
from fsm_trainer.analysis.overlap import Overlap, Sides
from fsm_trainer.analysis.sync_costs import SyncCosts, sync_costs
from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.schema import CONFIG_KEY, RUN_KEY

COLUMNS = (
    *("seq", "t_ns", "kind", "machine", "entity", "trigger", "source", "dest", "cause_seq", "batch_id", "engine"),
    *("rollout_version_first", "rollout_version_last", "train_version", "staleness", "tokens"),
    *("posted_ns", "started_ns", "finished_ns", "value", "reason", "message"),
)
"""The columns that a summary needs: a log read with these alone takes less time and memory."""


@dataclass(frozen=True)
class StalenessRow:
    """Batches consumed at one staleness."""

    staleness: int
    trained: int
    dropped: int


@dataclass(frozen=True)
class ResidencyRow:
    """Time of one machine in one state, for one cause if the state is a wait. Sums to the wall time per machine."""

    machine: str
    entity: str
    state: str
    cause: str | None
    ns: int
    share: float


@dataclass(frozen=True)
class Summary:
    """What `summarize` found."""

    path: str
    state: str
    """One of ended, running, crashed."""
    outcome: str | None
    """completed, interrupted or failed; None unless the run ended."""
    message: str | None
    """Why it ended so, and where."""
    problem: str | None
    """What is wrong with the log's file, if anything."""
    events: int
    wall_ns: int
    """From the first to the last event."""
    steps: int
    """Optimiser steps taken."""
    train_version: int
    rollout_versions: dict[str, int]
    """Version each engine served last, by engine."""
    batches: dict[str, int]
    """Batches admitted, by what became of them, and those still open."""
    drops: dict[str, int]
    """Dropped batches by reason."""
    staleness: tuple[StalenessRow, ...]
    residency: tuple[ResidencyRow, ...]
    sides: Sides | None
    overlap: Overlap | None
    resumed_from: str | None = None
    """The checkpoint that the run went on from."""
    first_version: int = 0
    """Optimiser steps taken before it."""
    synchronous: bool = False
    """Nothing may overlap: staleness 0, one worker, not greedy, as with the algorithms without `async-`."""
    syncs: SyncCosts | None = None
    """What the loads of weights cost; None if the engines did not say it."""

    @property
    def mean_staleness(self) -> float | None:
        """Of the trained batches, optimiser steps; None without any."""
        trained = sum(row.trained for row in self.staleness)
        return sum(row.staleness * row.trained for row in self.staleness) / trained if trained else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return asdict(self)


def summarize(run: str | Path) -> Summary:
    """Summarize a run directory or log file. ValueError if there is no log to read."""
    return summarize_log(read_log(run, columns=COLUMNS))


def summarize_log(log: EventLog) -> Summary:
    """Summarize a log that has been read."""
    events = frames.events_frame(log)
    ended = frames.ended_batches(events)
    spans = frames.intervals(events)
    window = overlap.training_window(events)
    operations = frames.operations(events)
    final = events.iloc[-1] if log.complete else None
    steps = frames.rows_of(events, "version", trigger="step")
    return Summary(
        path=str(log.path),
        state=log.state,
        outcome=None if final is None else str(final["reason"]),
        message=None if final is None or pd.isna(final["message"]) else str(final["message"]),
        problem=log.problem,
        events=len(events),
        wall_ns=int(events["t_ns"].max() - events["t_ns"].min()) if len(events) else 0,
        steps=len(steps),
        train_version=int(steps["train_version"].max()) if len(steps) else first_version(log),
        rollout_versions=rollout_versions(events),
        batches=batch_counts(events, ended),
        drops=_counts(ended[ended["state"] == "dropped"]["reason"]),
        staleness=staleness_table(ended),
        residency=residency_table(spans),
        sides=None if window is None else overlap.measure_sides(spans, window),
        overlap=None if window is None else overlap.measure_overlap(events, operations, ended, window),
        resumed_from=log.run_config.get("resume") if RUN_KEY in log.metadata else None,
        first_version=first_version(log),
        syncs=sync_costs(events),
        synchronous=CONFIG_KEY in log.metadata and is_synchronous(log.scheduler_config),
    )


def is_synchronous(config: Mapping[str, Any]) -> bool:
    """Whether a scheduler so configured does one thing after the other; batches from outside may always overlap."""
    ahead = config.get("max_staleness") != 0 or config.get("workers") != 1 or config.get("admission") == "greedy"
    return not ahead and not config.get("external_rollouts")


def first_version(log: EventLog) -> int:
    """train_version at the beginning: 0 unless the run went on from a checkpoint."""
    return int(log.scheduler_config.get("first_version", 0)) if CONFIG_KEY in log.metadata else 0


def rollout_versions(events: pd.DataFrame) -> dict[str, int]:
    """The version each engine loaded last."""
    loads = frames.rows_of(events, "version", trigger="load")
    last = loads.groupby("engine")["rollout_version_last"].last()
    return {str(engine): int(version) for engine, version in last.items()}


def batch_counts(events: pd.DataFrame, ended: pd.DataFrame) -> dict[str, int]:
    """How many batches were admitted, reached each terminal state, and are open."""
    admitted = len(frames.rows_of(events, "transition", machine="rollout", trigger="admit"))
    counts = ended["state"].value_counts()
    by_state = {state: int(counts.get(state, 0)) for state in BATCH_ENDS}
    return {"admitted": admitted, **by_state, "open": admitted - len(ended)}


def staleness_table(ended: pd.DataFrame) -> tuple[StalenessRow, ...]:
    """Consumed batches by staleness."""
    consumed = ended[ended["staleness"].notna() & ended["state"].isin(["trained", "dropped"])]
    counts = consumed.groupby(["staleness", "state"]).size()
    return tuple(
        StalenessRow(int(value), int(counts.get((value, "trained"), 0)), int(counts.get((value, "dropped"), 0)))
        for value in sorted(consumed["staleness"].unique())
    )


def residency_table(spans: pd.DataFrame) -> tuple[ResidencyRow, ...]:
    """Where each machine's wall time went, in whole nanoseconds."""
    if spans.empty:
        return ()
    spent = frames.residency(spans)
    wall = max(int(spans["end_ns"].max() - spans["start_ns"].min()), 1)
    columns = (spent[name].tolist() for name in ("machine", "entity", "state", "cause", "ns"))
    return tuple(
        ResidencyRow(machine, entity, state, cause if isinstance(cause, str) else None, ns, ns / wall)
        for machine, entity, state, cause, ns in zip(*columns, strict=True)
    )


def _counts(values: pd.Series) -> dict[str, int]:
    return {str(value): int(count) for value, count in values.value_counts().items()}
