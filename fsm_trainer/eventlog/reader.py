"""Reads a run's log up to its last whole, good record batch, and says what is lacking.

A log may be whole, still being written, cut off by a crash, damaged or compacted; only what carries a right checksum
and the next seq is returned. The reader knows nothing of what the rows mean, except that `run_end` is the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog import compacted
from fsm_trainer.eventlog.chain import Chain, read_chain
from fsm_trainer.eventlog.layout import find_log, is_locked
from fsm_trainer.eventlog.schema import CONFIG_KEY, POLICY_KEY, RUN_KEY, SCHEMA, VERSION_KEY, policy_rev
from fsm_trainer.eventlog.stream import Take

__all__ = ["EventLog", "find_log", "read_log", "records"]

_KINDS = {kind.value: kind for kind in RecordKind}
_KIND_AT = SCHEMA.get_field_index("kind")
_ALWAYS = ("seq", "kind")
"""Columns that the reader itself needs."""


@dataclass(frozen=True)
class EventLog:
    """What could be read of one run's log."""

    path: Path
    """The log's file, or the first of several."""
    table: pa.Table
    """All good rows: the columns of `Record` in order, then any that a newer minor schema added."""
    metadata: dict[str, str]
    complete: bool
    """The last row is `run_end`. Otherwise the run is still going or has crashed."""
    writing: bool
    """A live process holds the log open for writing."""
    dropped_bytes: int
    """Bytes after the last good record batch that could not be used."""
    problem: str | None
    """Why reading stopped before the end of the log; None if it did not."""
    damaged: bool
    """Bytes are wrong or files missing, not only cut off: a crash alone does not explain it."""
    compacted: bool = False
    """It was read from a compacted file."""

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The scheduler's configuration, as `SchedulerConfig.from_dict` takes it."""
        return dict(json.loads(self.metadata[CONFIG_KEY]))

    @property
    def run_config(self) -> dict[str, Any]:
        """The whole run's configuration."""
        return dict(json.loads(self.metadata[RUN_KEY]))

    @property
    def schema_version(self) -> str:
        """major.minor of the schema that the log was written with."""
        return self.metadata[VERSION_KEY]

    @property
    def same_policy(self) -> bool:
        """The decision code at hand is the one that wrote the log."""
        return self.metadata.get(POLICY_KEY) == policy_rev()

    @property
    def state(self) -> str:
        """One of ended, running, crashed."""
        if self.complete:
            return "ended"
        return "running" if self.writing else "crashed"


def read_log(run: str | Path, *, columns: Sequence[str] | None = None, take: Take | None = None) -> EventLog:
    """Read a run directory's log, or the file itself. ValueError when it is none, or of another major schema.

    `columns` reads only these of the columns of `Record`, besides `seq` and `kind`, and takes less memory. `take` is
    given each stretch of rows as it is read, in order, and what it returns is kept instead: of a long log, what fits.
    """
    path = find_log(run)
    names = None if columns is None else [name for name in SCHEMA.names if name in {*columns, *_ALWAYS}]
    if compacted.is_compacted(path):
        table, metadata = compacted.read(path, names)
        last = table["kind"][-1].as_py() if table.num_rows else None
        table = _known_columns_first(table, names)
        return _event_log(path, table if take is None else take(table), metadata, None, last, writing=False)
    # Asked before reading: a run that ends in between then shows as ended.
    writing = is_locked(path)
    chain = read_chain(path, writing=writing, columns=names, take=take)
    head = chain.segments[0]
    schema = head.schema if names is None else pa.schema([f for f in head.schema if f.name in names])
    tables = [table for segment in chain.segments for table in segment.tables]
    empty = schema.empty_table() if take is None else take(schema.empty_table())
    table = _known_columns_first(pa.concat_tables([empty, *tables]), names)
    return _event_log(path, table, head.metadata, chain, chain.last_kind, writing=writing)


def records(table: pa.Table) -> Iterator[Record]:
    """The rows as records."""
    names = list(Record._fields)
    for batch in table.select(names).to_batches(max_chunksize=4096):
        columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
        columns[_KIND_AT] = [_KINDS[kind] for kind in columns[_KIND_AT]]
        yield from map(Record._make, zip(*columns, strict=True))


def _event_log(
    path: Path, table: pa.Table, metadata: dict[str, str], chain: Chain | None, last: str | None, *, writing: bool
) -> EventLog:
    stopped = None if chain is None else chain.stopped
    return EventLog(
        path=path,
        table=table,
        metadata=metadata,
        complete=last == RecordKind.RUN_END.value,
        writing=writing,
        dropped_bytes=0 if chain is None or stopped is None else chain.dropped_bytes,
        problem=None if chain is None or stopped is None else _problem(chain),
        damaged=stopped is not None and not stopped.torn,
        compacted=chain is None,
    )


def _problem(chain: Chain) -> str:
    last = chain.segments[-1]
    where = "" if len(chain.segments) == 1 else f" of {last.path.name}"
    return f"reading stopped at byte {last.end} of {last.size}{where}: {chain.stopped}"


def _known_columns_first(table: pa.Table, names: Sequence[str] | None) -> pa.Table:
    """Add the columns that an older minor schema lacks, as nulls, and put those it does not know last."""
    wanted = [field for field in SCHEMA if names is None or field.name in names]
    present = dict(zip(table.column_names, table.columns, strict=True))
    columns = {f.name: present.pop(f.name) if f.name in present else pa.nulls(table.num_rows, f.type) for f in wanted}
    return pa.table({**columns, **present})
