"""Feeds a log's inputs to the scheduler again and compares every decision with the logged one.

It knows the order of rows in a log (an input, then what followed from it) and nothing of the rules themselves: those
are the scheduler's, of which there is one implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, Input, Record, RecordKind, record_input
from fsm_trainer.eventlog.reader import EventLog, read_log, records
from fsm_trainer.eventlog.schema import POLICY_KEY, policy_rev


class Core(Protocol):
    """The part of the scheduler that a log can be checked with."""

    def step(self, event: Input) -> tuple[list[Record], list[Command]]:
        """Decide on one input."""

    def annotate(self, record: Record) -> Record:
        """Number a row that carries no decision."""


@dataclass(frozen=True)
class Divergence:
    """The first row at which the log and the scheduler disagree."""

    seq: int
    expected: Record | None
    """The row the scheduler gives; None if it gives none here."""
    logged: Record | None
    """The row in the log; None if the log ends here."""
    columns: tuple[str, ...]
    """The columns that differ, when there are both rows."""
    problem: str
    """What is wrong, in words."""


@dataclass(frozen=True)
class VerifyResult:
    """How far a log agrees with the scheduler."""

    inputs: int
    decisions: int
    """Rows compared that follow from an input: transitions, commands, versions, queue, drops, syncs, waits, the end."""
    metrics: int
    divergence: Divergence | None
    log: EventLog
    same_policy: bool
    """The decision code is the one that wrote the log."""

    @property
    def complete(self) -> bool:
        """The log reaches the end of the run."""
        return self.log.complete

    @property
    def ok(self) -> bool:
        """Everything that could be read agrees, and nothing that was written is damaged."""
        return self.divergence is None and not self.log.damaged


def verify(run: str | Path, *, build: Callable[[dict[str, Any]], Core] | None = None) -> VerifyResult:
    """Verify a run's log, or the prefix there is of it. ValueError if there is no log to read.

    `build` makes the core from the logged configuration; the default is the scheduler.
    """
    log = read_log(run)
    core = (build or _build_scheduler)(_config(log))
    walk = _Walk(core)
    divergence = walk.run(records(log.table), complete=log.complete)
    return VerifyResult(
        inputs=walk.inputs,
        decisions=walk.decisions,
        metrics=walk.metrics,
        divergence=divergence,
        log=log,
        same_policy=log.metadata.get(POLICY_KEY) == policy_rev(),
    )


def _config(log: EventLog) -> dict[str, Any]:
    try:
        return log.scheduler_config
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{log.path} carries no scheduler configuration, so it cannot be verified") from error


def _build_scheduler(config: dict[str, Any]) -> Core:
    from fsm_trainer.core.scheduler import Scheduler

    try:
        return Scheduler(SchedulerConfig.from_dict(config))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the log's scheduler configuration is not one of this fsm_trainer: {error}") from error


class _Walk:
    """One pass over the rows, with the rows that the core gave for the last input and that are still to come."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.inputs = 0
        self.decisions = 0
        self.metrics = 0
        self._due: list[Record] = []
        """Rows still to come, last first."""

    def run(self, rows: Iterator[Record], *, complete: bool) -> Divergence | None:
        """The first divergence. A log that is not complete may end anywhere."""
        seq = -1
        for row in rows:
            seq = row.seq
            if not self._due:
                refused = self._advance(row)
                if refused is not None:
                    return refused
            expected = self._due.pop()
            if row != expected:
                return _difference(expected, row)
            self._count(row)
        if complete and self._due:
            return Divergence(seq + 1, self._due[-1], None, (), "the log ends before the decisions do")
        return None

    def _advance(self, row: Record) -> Divergence | None:
        """Let the core go on with a row that no input is behind; a Divergence if it cannot."""
        if row.kind is RecordKind.METRIC:
            self._due = [self.core.annotate(row._replace(seq=-1))]
            return None
        if row.kind is not RecordKind.INPUT:
            return Divergence(row.seq, None, row, (), "no logged input leads to this row")
        try:
            rows, _ = self.core.step(record_input(row))
        except Exception as error:  # whatever an impossible input makes the core raise is the finding, told in full
            problem = f"the scheduler cannot take this input: {type(error).__name__}: {error}"
            return Divergence(row.seq, None, row, (), problem)
        self._due = rows[::-1]
        return None

    def _count(self, row: Record) -> None:
        if row.kind is RecordKind.INPUT:
            self.inputs += 1
        elif row.kind is RecordKind.METRIC:
            self.metrics += 1
        else:
            self.decisions += 1


def _difference(expected: Record, logged: Record) -> Divergence:
    columns = tuple(name for name, a, b in zip(Record._fields, expected, logged, strict=True) if a is not b and a != b)
    return Divergence(logged.seq, expected, logged, columns, f"{', '.join(columns)} differ")
