"""Writes records to `events.arrows` as they come: buffered rows, one `os.write` per record batch.

The loop thread appends; a flusher thread writes what is older than the flush interval, so that a crash loses little.
The writer knows nothing of what the rows mean.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.frame import END_OF_STREAM, encode_batch
from fsm_trainer.eventlog.schema import SCHEMA, run_schema
from fsm_trainer.eventlog.segments import SegmentWriter

_TYPES = SCHEMA.types
_datasync = getattr(os, "fdatasync", os.fsync)
_MAX_BACKLOG = 64
"""Full record batches that may wait for the flusher before the loop thread writes them itself."""


class EventLogError(OSError):
    """The event log could not be written, which is a failure of the run."""


def to_batch(rows: list[Record]) -> pa.RecordBatch:
    """Rows as one record batch."""
    columns = [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), _TYPES, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def write_log(path: str | Path, rows: Sequence[Record], metadata: Mapping[str, str], *, max_rows: int = 256) -> None:
    """Write a whole log of rows that exist already: a repair, a conversion, a test's history."""
    with Path(path).open("xb") as file:
        file.write(run_schema(metadata).serialize())
        for start in range(0, len(rows), max_rows):
            chunk = list(rows[start : start + max_rows])
            file.write(encode_batch(to_batch(chunk), chunk[0].seq))
        file.write(END_OF_STREAM)


class EventLogWriter:
    """One run's event log. `append` from one thread; any thread may flush. Raises ValueError over an existing log.

    The first error of writing is kept, and every later call raises it as EventLogError; nothing is written after it.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        metadata: Mapping[str, str],
        max_rows: int = 256,
        flush_interval_s: float = 0.05,
        segment_bytes: int = 0,
    ) -> None:
        """Create the file and write the schema; `metadata` is what `schema.log_metadata` gives.

        Once a file has `segment_bytes` the log goes on in another (0: one file, however long).
        """
        self.path = Path(path)
        self._max_rows = max_rows
        self._flush_interval_s = flush_interval_s
        self._rows: list[Record] = []
        self._error: Exception | None = None
        self._closed = False
        self._flusher_idle = False
        self._sync_wanted = False
        self._lock = threading.Lock()
        """Guards the fields above."""
        self._changed = threading.Condition(self._lock)
        """Notified when the flusher has to act."""
        self._file_lock = threading.Lock()
        """Guards the file and the order of rows in it. Taken before `_lock`, never after."""
        self._files = self._open(metadata, segment_bytes)
        self._flusher = threading.Thread(target=self._flush_old_rows, name="fsm-event-log", daemon=True)
        self._flusher.start()

    def append(self, record: Record) -> None:
        """Take one row; it is on its way to the file within the flush interval."""
        with self._lock:
            if self._closed or self._error is not None:
                self._refuse()
            self._rows.append(record)
            count = len(self._rows)
            if self._flusher_idle or count == self._max_rows:
                self._flusher_idle = False
                self._changed.notify()
        if count >= self._max_rows * _MAX_BACKLOG:
            self.flush()

    def flush(self) -> None:
        """Write every row taken so far: after it, a kill of the process loses none of them."""
        with self._file_lock:
            if self._closed or self._error is not None:
                self._refuse()
            self._write_rows()
        self._raise_error()

    def sync(self) -> None:
        """Have the flusher write what there is and bring it to the storage at once, against a power cut.

        The caller does not wait: that takes milliseconds, in which the loop would decide nothing.
        """
        with self._lock:
            if self._closed or self._error is not None:
                self._refuse()
            self._sync_wanted = True
            self._changed.notify()

    def close(self) -> None:
        """Flush, end the stream, wait for the storage, and stop the flusher. Closing again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._changed.notify()
        self._flusher.join()
        with self._file_lock:
            self._write_rows()
            with self._keeping_error():
                if self._error is None:
                    self._files.end()
            with self._keeping_error():
                self._files.close()
        self._raise_error()

    def __enter__(self) -> EventLogWriter:
        """Enter: the writer itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Close."""
        self.close()

    def _open(self, metadata: Mapping[str, str], segment_bytes: int) -> SegmentWriter:
        try:
            return SegmentWriter(self.path, metadata, segment_bytes)
        except FileExistsError as error:
            raise ValueError(f"{self.path} already holds an event log; choose another output directory") from error
        except OSError as error:
            raise EventLogError(f"cannot create the event log {self.path}: {error}") from error

    def _flush_old_rows(self) -> None:
        """The flusher thread: write the rows once a batch is full or its oldest row is old enough."""
        while True:
            with self._changed:
                self._flusher_idle = not self._rows
                self._changed.wait_for(lambda: self._rows or self._sync_wanted or self._closed)
                self._flusher_idle = False
                self._changed.wait_for(self._is_due, timeout=self._flush_interval_s)
                if self._closed:
                    return
                sync, self._sync_wanted = self._sync_wanted, False
            with self._file_lock:
                self._write_rows()
                # Another thread closes the file once it is full; what is before it is synced by then.
                fd = os.dup(self._files.fd) if sync else -1
            if sync:
                # Without the file lock, or the loop thread would wait for the storage after all.
                with self._keeping_error(), _closing(fd):
                    _datasync(fd)

    def _is_due(self) -> bool:
        return self._closed or self._sync_wanted or len(self._rows) >= self._max_rows

    def _write_rows(self) -> None:
        with self._lock:
            rows, self._rows = self._rows, []
        for start in range(0, len(rows), self._max_rows):
            chunk = rows[start : start + self._max_rows]
            with self._keeping_error():
                if self._error is None:
                    self._files.write(encode_batch(to_batch(chunk), chunk[0].seq), chunk[0].seq)

    @contextlib.contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep the first failure for the loop thread, whichever thread it happens in."""
        try:
            yield
        except Exception as error:
            with self._lock:
                if self._error is None:
                    self._error = error

    def _raise_error(self) -> None:
        if self._error is not None:
            raise EventLogError(f"cannot write the event log {self.path}: {self._error}") from self._error

    def _refuse(self) -> None:
        self._raise_error()
        raise EventLogError(f"the event log {self.path} is closed")


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(fd)
