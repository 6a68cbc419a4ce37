"""Reads `events.arrows` up to its last whole, good record batch, and says what is lacking.

A log may be whole, still being written, cut off by a crash, or damaged; only what carries a right checksum and the
next seq is returned. The reader knows nothing of what the rows mean, except that `run_end` is the last.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.eventlog.frame import FrameError, check_frame, good_frame_follows, read_frame
from fsm_trainer.eventlog.schema import (
    CONFIG_KEY,
    CRC_KEY,
    LOG_NAME,
    RUN_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    VERSION_KEY,
    schema_crc,
)

_KINDS = {kind.value: kind for kind in RecordKind}
_KIND_AT = SCHEMA.get_field_index("kind")


@dataclass(frozen=True)
class EventLog:
    """What could be read of one run's log."""

    path: Path
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
    """Why reading stopped before the end of the file; None if it did not."""
    damaged: bool
    """Bytes are wrong, not only lacking: a crash alone does not explain it."""

    @property
    def scheduler_config(self) -> dict[str, Any]:
        """The scheduler's configuration, as `SchedulerConfig.from_dict` takes it."""
        return dict(json.loads(self.metadata[CONFIG_KEY]))

    @property
    def run_config(self) -> dict[str, Any]:
        """The whole run's configuration."""
        return dict(json.loads(self.metadata[RUN_KEY]))

    @property
    def state(self) -> str:
        """One of ended, running, crashed."""
        if self.complete:
            return "ended"
        return "running" if self.writing else "crashed"


def read_log(run: str | Path) -> EventLog:
    """Read a run directory's log, or the file itself. ValueError when it is none, or made by a newer major schema."""
    path = find_log(run)
    # Asked before reading: a run that ends in between then shows as ended.
    writing = _is_locked(path)
    try:
        buffer = pa.py_buffer(path.read_bytes())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    schema, metadata, start = _read_schema(buffer, path)
    batches, end, stopped = _read_batches(buffer, schema, start)
    table = _known_columns_first(pa.Table.from_batches(batches, schema))
    last = table["kind"][-1].as_py() if table.num_rows else None
    return EventLog(
        path=path,
        table=table,
        metadata=metadata,
        complete=last == RecordKind.RUN_END.value,
        writing=writing,
        dropped_bytes=buffer.size - end,
        problem=None if stopped is None else f"reading stopped at byte {end} of {buffer.size}: {stopped}",
        damaged=stopped is not None and not stopped.torn,
    )


def records(table: pa.Table) -> Iterator[Record]:
    """The rows as records."""
    names = list(Record._fields)
    for batch in table.select(names).to_batches(max_chunksize=4096):
        columns: list[list[Any]] = [column.to_pylist() for column in batch.columns]
        columns[_KIND_AT] = [_KINDS[kind] for kind in columns[_KIND_AT]]
        yield from map(Record._make, zip(*columns, strict=True))


def find_log(run: str | Path) -> Path:
    """The log's file of a run directory or file; ValueError if there is none."""
    path = Path(run)
    if path.is_dir():
        if not (path / LOG_NAME).is_file():
            raise ValueError(f"{path} is not a run directory: it holds no {LOG_NAME}")
        return path / LOG_NAME
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a run directory or its {LOG_NAME}")
    return path


def _is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read_schema(buffer: pa.Buffer, path: Path) -> tuple[pa.Schema, dict[str, str], int]:
    try:
        frame = read_frame(buffer, 0)
        if frame is None:
            raise FrameError("it is empty", torn=True)
        if frame.message.type != "schema":
            raise FrameError("it does not begin with a schema")
        raw = pa.ipc.read_schema(frame.message)
        # Rebuilt from its fields, so that a wrong byte-order flag cannot make Arrow swap every number.
        schema = pa.schema(list(raw))
        metadata = {key.decode(): value.decode() for key, value in (raw.metadata or {}).items()}
        _check_version(metadata, path)
        if schema_crc(schema, metadata) != metadata.get(CRC_KEY):
            raise FrameError("its schema's checksum is wrong")
    except FrameError as error:
        hint = "the file was cut off before its first row" if error.torn else "it was not written by fsm_trainer"
        raise ValueError(f"{path} is not a readable event log: {error} ({hint}, or is damaged)") from error
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a readable event log: its schema is invalid") from error
    for field in SCHEMA:
        at = schema.get_field_index(field.name)
        if (at < 0 and not field.nullable) or (at >= 0 and schema.field(at).type != field.type):
            raise ValueError(f"{path} is not an event log of schema {SCHEMA_VERSION}: column {field.name} is wrong")
    return schema, metadata, frame.end


def _check_version(metadata: dict[str, str], path: Path) -> None:
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise FrameError(f"its schema has no {VERSION_KEY}")
    major = version.split(".")[0]
    if not major.isdecimal():
        raise FrameError(f"its {VERSION_KEY} is {version!r}")
    if int(major) > int(SCHEMA_VERSION.split(".")[0]):
        raise ValueError(
            f"{path} has event log schema {version}, newer than {SCHEMA_VERSION}, which this fsm_trainer reads; "
            f"use a newer fsm_trainer"
        )


def _read_batches(
    buffer: pa.Buffer, schema: pa.Schema, start: int
) -> tuple[list[pa.RecordBatch], int, FrameError | None]:
    """The good batches, the byte after the last of them (or of the stream), and what stopped the reading."""
    batches: list[pa.RecordBatch] = []
    end = start
    rows = 0
    try:
        while (frame := read_frame(buffer, end)) is not None:
            check_frame(buffer, frame)
            batch = pa.ipc.read_record_batch(frame.message, schema)
            if not np.array_equal(batch.column("seq").to_numpy(), np.arange(rows, rows + batch.num_rows)):
                raise FrameError(f"seq is not dense: a record batch does not begin with {rows} and count on")
            batches.append(batch)
            rows += batch.num_rows
            end = frame.end
    except FrameError as error:
        torn = error.torn and not good_frame_follows(buffer, end)
        return batches, end, FrameError(str(error), torn=torn)
    return _after_end(buffer, batches, end)


def _after_end(
    buffer: pa.Buffer, batches: list[pa.RecordBatch], end: int
) -> tuple[list[pa.RecordBatch], int, FrameError | None]:
    mark = min(buffer.size - end, 8)
    if buffer.size > end + mark:
        return batches, end + mark, FrameError("bytes follow the end of the stream")
    return batches, end + mark, None


def _known_columns_first(table: pa.Table) -> pa.Table:
    """Add the columns that an older minor schema lacks, as nulls, and put those it does not know last."""
    columns: dict[str, Any] = {}
    for field in SCHEMA:
        present = field.name in table.column_names
        columns[field.name] = table[field.name] if present else pa.nulls(table.num_rows, field.type)
    columns.update({name: table[name] for name in table.column_names if name not in columns})
    return pa.table(columns)
