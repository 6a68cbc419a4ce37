"""Where two runs first decided differently. Compares what the scheduler decided, not when, nor what was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.eventlog.reader import EventLog

DECISIONS = ("transition", "command", "version", "queue", "drop", "sync", "checkpoint", "wait", "ignored", "run_end")
"""Kinds of rows that the scheduler decided."""
COMPARED = (
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
    "reason",
)
"""What of them is compared: not `seq` and `cause_seq`, which metrics shift, nor times, tokens, digests and messages."""


@dataclass(frozen=True)
class Side:
    """One run's decision at the first difference."""

    decision: dict[str, Any] | None
    """The row's filled columns; None if the run has no further decision."""
    input: dict[str, Any] | None
    """The input it follows from."""


@dataclass(frozen=True)
class DecisionDiff:
    """What two runs decided."""

    same: int
    """Decisions from the first on that are equal on both sides."""
    decisions: tuple[int, int]
    columns: tuple[str, ...]
    """Columns that differ at the first difference; empty if there is none or one side has ended."""
    first: tuple[Side, Side] | None
    """None if both runs decided the same to the end of both logs."""

    @property
    def equal(self) -> bool:
        """Both runs decided the same."""
        return self.first is None


def diff_decisions(one: EventLog, other: EventLog) -> DecisionDiff:
    """The first decision at which two logs differ. A cut-off log simply ends."""
    a, b = _decisions(one.table), _decisions(other.table)
    common = min(a.num_rows, b.num_rows)
    at = _first_difference(a, b, common)
    if at is None:
        if a.num_rows == b.num_rows:
            return DecisionDiff(common, (a.num_rows, b.num_rows), (), None)
        at = common
    sides = (_side(one.table, a, at), _side(other.table, b, at))
    columns: tuple[str, ...] = ()
    if at < common:
        columns = tuple(name for name in COMPARED if a[name][at].as_py() != b[name][at].as_py())
    return DecisionDiff(at, (a.num_rows, b.num_rows), columns, sides)


def _decisions(table: pa.Table) -> pa.Table:
    """The decisions of a log, with the reasons that name a seq taken out."""
    rows = table.filter(pc.field("kind").isin(DECISIONS)).combine_chunks()
    is_abort = pc.fill_null(pc.and_(pc.equal(rows["kind"], "command"), pc.equal(rows["trigger"], "abort")), False)
    reason = pc.if_else(is_abort, pa.scalar("op", pa.utf8()), rows["reason"])
    return rows.set_column(rows.schema.get_field_index("reason"), "reason", reason)


def _first_difference(a: pa.Table, b: pa.Table, common: int) -> int | None:
    """The first of the first `common` rows that differs in any compared column."""
    found = []
    for name in COMPARED:
        left, right = (_flat(table[name].slice(0, common)) for table in (a, b))
        unequal = pc.or_(pc.fill_null(pc.not_equal(left, right), False), pc.xor(pc.is_null(left), pc.is_null(right)))
        at = pc.index(unequal, True).as_py()
        if at >= 0:
            found.append(at)
    return min(found, default=None)


def _flat(column: pa.ChunkedArray) -> pa.Array:
    whole = column.combine_chunks()
    return whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole


def _side(table: pa.Table, decisions: pa.Table, at: int) -> Side:
    if at >= decisions.num_rows:
        return Side(None, None)
    row = decisions.slice(at, 1).to_pylist()[0]
    cause = row["cause_seq"]
    # seq is dense from 0, so it is the row's place in the table.
    input_row = table.slice(cause, 1).to_pylist()[0] if cause is not None else None
    return Side(_filled(row), None if input_row is None else _filled(input_row))


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
