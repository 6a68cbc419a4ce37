"""Feeds a log's inputs to the scheduler again and compares every decision with the logged one.

It knows the order of rows in a log (an input, then what followed from it) and nothing of the rules themselves: those
are the scheduler's, of which there is one implementation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Command, Input, Record, RecordKind, record_input
from fsm_trainer.eventlog.reader import EventLog, read_log, records
from fsm_trainer.eventlog.writer import to_batch

_CHUNK = 4096
"""Rows decided and compared at a time."""
_LEADING = pa.array([RecordKind.INPUT.value, RecordKind.METRIC.value])


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
    with _no_collection():
        divergence = walk.run(log.table, complete=log.complete)
    return VerifyResult(
        inputs=walk.inputs,
        decisions=walk.decisions,
        metrics=walk.metrics,
        divergence=divergence,
        log=log,
        same_policy=log.same_policy,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Leave the search for reference cycles out: millions of rows come and go, and none is part of one."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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
    """One pass over the rows, a chunk at a time: the core decides on the inputs in it, then all columns are compared.

    What the core decides after a divergence means nothing, and is compared with nothing: the first difference counts.
    """

    def __init__(self, core: Core) -> None:
        self.core = core
        self.inputs = 0
        self.decisions = 0
        self.metrics = 0
        self._due: list[Record] = []
        """Rows that the core gave and that are still to come."""

    def run(self, table: pa.Table, *, complete: bool) -> Divergence | None:
        """The first divergence. A log that is not complete may end anywhere."""
        table = table.select(list(Record._fields))
        for chunk in table.to_batches(max_chunksize=_CHUNK):
            divergence = self._check(chunk)
            if divergence is not None:
                return divergence
        if complete and self._due:
            return Divergence(table.num_rows, self._due[0], None, (), "the log ends before the decisions do")
        return None

    def _check(self, chunk: pa.RecordBatch) -> Divergence | None:
        """Decide and compare the rows of one chunk."""
        leading = _leading_rows(chunk)
        expected, refused = self._decide(chunk, leading)
        here, self._due = expected[: chunk.num_rows], expected[chunk.num_rows :]
        at = _first_difference(here, chunk)
        self._count(here[:at])
        if at is not None:
            # The very row that a metric was made of, or its nan would differ from itself.
            return _difference(here[at], leading.get(at) or _row(chunk, at))
        return refused

    def _decide(self, chunk: pa.RecordBatch, leading: dict[int, Record]) -> tuple[list[Record], Divergence | None]:
        """The rows that the core gives for the chunk, and why they end before it does, if so."""
        expected = self._due
        while len(expected) < chunk.num_rows:
            row = leading.get(len(expected))
            if row is None:
                row = _row(chunk, len(expected))
                return expected, Divergence(row.seq, None, row, (), "no logged input leads to this row")
            if row.kind is RecordKind.METRIC:
                expected.append(self.core.annotate(row._replace(seq=-1)))
                continue
            try:
                rows, _ = self.core.step(record_input(row))
            except Exception as error:  # whatever an impossible input makes the core raise is the finding, told in full
                problem = f"the scheduler cannot take this input: {type(error).__name__}: {error}"
                return expected, Divergence(row.seq, None, row, (), problem)
            assert rows, "the first row of a step is its input"
            expected.extend(rows)
        return expected, None

    def _count(self, rows: list[Record]) -> None:
        kinds = [row.kind for row in rows]
        inputs, metrics = kinds.count(RecordKind.INPUT), kinds.count(RecordKind.METRIC)
        self.inputs += inputs
        self.metrics += metrics
        self.decisions += len(rows) - inputs - metrics


def _leading_rows(chunk: pa.RecordBatch) -> dict[int, Record]:
    """The inputs and metrics by their place in the chunk: the only rows that the core goes on with."""
    at = pc.indices_nonzero(pc.is_in(chunk.column("kind"), value_set=_LEADING))
    return dict(zip(at.to_pylist(), records(pa.table(chunk.take(at))), strict=True))


def _row(chunk: pa.RecordBatch, at: int) -> Record:
    return next(records(pa.table(chunk.slice(at, 1))))


def _first_difference(expected: list[Record], chunk: pa.RecordBatch) -> int | None:
    """The place of the first row that is not as expected."""
    if not expected:
        return None
    first = None
    logged = chunk.slice(0, len(expected))
    for ours, theirs in zip(to_batch(expected).columns, logged.columns, strict=True):
        if pa.types.is_floating(ours.type):
            ours, theirs = ours.view(pa.int64()), theirs.view(pa.int64())  # so that nan equals itself
        if not ours.equals(theirs):
            unequal = pc.fill_null(pc.not_equal(ours, theirs), False)
            differ = pc.or_(unequal, pc.xor(ours.is_null(), theirs.is_null()))
            at = pc.index(differ, True).as_py()
            first = at if first is None else min(first, at)
    return first


def _difference(expected: Record, logged: Record) -> Divergence:
    columns = tuple(name for name, a, b in zip(Record._fields, expected, logged, strict=True) if a is not b and a != b)
    return Divergence(logged.seq, expected, logged, columns, f"{', '.join(columns)} differ")
