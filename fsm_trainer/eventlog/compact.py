"""Turns a log into one compressed file and removes the stream, once the file is known to hold the same rows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from fsm_trainer.eventlog import compacted
from fsm_trainer.eventlog.layout import COMPACT_NAMES, find_log, later_segments, locked, sync_directory
from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.schema import LOG_NAME


@dataclass(frozen=True)
class Compaction:
    """What `compact` did."""

    path: Path
    """The compacted file."""
    events: int
    bytes_before: int
    """Size of the files that were removed; 0 if there was nothing to do."""
    bytes_after: int


def compact(run: str | Path, form: str = "arrow") -> Compaction:
    """Compact a run directory's log into `events.arrow` or `events.parquet` (`form`: arrow or parquet).

    Killed at any moment it leaves a readable log, and called again it goes on. Nothing to do for a compacted one.
    ValueError if there is no log, it is damaged or torn, the run is still going, or a file cannot be written.
    """
    if form not in COMPACT_NAMES:
        raise ValueError(f"a log is compacted to {form!r}, expected one of {', '.join(COMPACT_NAMES)}")
    found = find_log(run)
    directory, stream = found.parent, found.parent / LOG_NAME
    if found != stream and not compacted.is_compacted(found):
        raise ValueError(f"{found} has a name of its own; only a run directory's {LOG_NAME} is compacted")
    if not stream.is_file():
        log = read_log(found)
        return Compaction(found, log.table.num_rows, 0, found.stat().st_size)
    try:
        with locked(stream, "compact it"):
            return _compact(directory, stream, form)
    except OSError as error:
        raise ValueError(f"cannot compact {stream}: {error.strerror or error}") from error


def _compact(directory: Path, stream: Path, form: str) -> Compaction:
    existing = next((p for name in COMPACT_NAMES.values() if (p := directory / name).is_file()), None)
    if existing is None:
        path = directory / COMPACT_NAMES[form]
        log = _whole(stream)
        _write(path, compacted.encode(log.table, log.metadata, form), log)
    else:
        # Killed before the stream was removed. It may lack its last files by now, but holds nothing else.
        path, log = existing, read_log(stream)
        _check_same(read_log(path), log, log.table.num_rows, path)
    before = _remove(stream)
    return Compaction(path, read_log(path).table.num_rows, before, path.stat().st_size)


def _whole(stream: Path) -> EventLog:
    log = read_log(stream)
    if log.damaged:
        raise ValueError(f"{stream} is damaged and is left as it is: {log.problem}")
    if log.problem is not None:
        raise ValueError(f"{stream} is cut off: {log.problem}; run `fsm-replay recover` first")
    return log


def _write(path: Path, data: bytes, log: EventLog) -> None:
    """Write, read back, compare, and only then give the file its name."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        _check_same(read_log(temporary), log, log.table.num_rows, temporary)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _remove(stream: Path) -> int:
    """Remove the stream's files, the first one last, so that a log is never found without its beginning."""
    files = [stream, *later_segments(stream)]
    size = sum(path.stat().st_size for path in files)
    for path in reversed(files):
        path.unlink()
    sync_directory(stream.parent)
    return size


def _check_same(copy: EventLog, log: EventLog, rows: int, path: Path) -> None:
    """Raise ValueError unless the copy begins with every row and column of the log, and has its metadata."""
    if copy.metadata != log.metadata or not same_rows(copy.table.slice(0, rows), log.table):
        raise ValueError(f"{path} does not hold the rows of {log.path}, which is left as it is; remove the wrong one")


def same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Whether two tables have equal columns, nan being equal to nan of the same bits."""
    if one.schema != other.schema or one.num_rows != other.num_rows:
        return False
    return all(_same_column(a, b) for a, b in zip(one.columns, other.columns, strict=True))


def _same_column(a: pa.ChunkedArray, b: pa.ChunkedArray) -> bool:
    if not pa.types.is_floating(a.type):
        return bool(a.equals(b))
    same_bits = np.array_equal(_bits(a), _bits(b))
    return same_bits and bool(a.is_null().equals(b.is_null()))


def _bits(column: pa.ChunkedArray) -> np.ndarray:
    return np.asarray(column.fill_null(0.0)).view(np.int64)
