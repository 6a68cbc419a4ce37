"""Reads one file of a log, an Arrow stream, up to its last whole, good record batch.

Every message is checked before Arrow interprets it, and copied into tables a window of bytes at a time, so that a long
log takes the memory of its rows and not of its file besides. Nothing here knows of other files.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa

from fsm_trainer.eventlog.frame import (
    END_OF_STREAM,
    Frame,
    FrameError,
    check_frame,
    good_frame_follows,
    metadata_of,
    read_frame,
)
from fsm_trainer.eventlog.schema import CONTINUED_KEY, CRC_KEY, SCHEMA, SCHEMA_VERSION, VERSION_KEY, schema_crc

Take = Callable[[pa.Table], pa.Table]
"""Given each stretch of rows as it is read, in order; what it returns is kept in its place."""

_WINDOW = 8 << 20
"""Bytes read at a time; a message may be longer."""


@dataclass
class Segment:
    """One file of a log, as far as it could be read."""

    path: Path
    size: int
    schema: pa.Schema
    metadata: dict[str, str]
    crc32: int
    """Of the bytes up to `rows_end`."""
    rows_end: int
    """The byte after the last good row, or after the schema."""
    end: int
    """The byte after the last good message, or after the mark that ends the stream."""
    tables: list[pa.Table] = field(default_factory=list)
    rows: int = 0
    last_kind: str | None = None
    """The kind of the last row."""
    continued: bool = False
    """It ends with the mark that the log goes on in the next file."""
    stopped: FrameError | None = None
    """Why reading stopped before the end of the file."""

    def append(
        self, buffer: pa.Buffer, frames: Sequence[Frame], first_seq: int, columns: list[str] | None, take: Take | None
    ) -> None:
        """Take the rows of good messages; FrameError, after the good ones, if one does not continue `seq`."""
        try:
            batches = [pa.ipc.read_record_batch(frame.message, self.schema) for frame in frames]
        except pa.ArrowException as error:
            raise FrameError("a record batch does not fit the schema") from error
        table, good = self._table(batches, columns), len(batches)
        if not continues(table, first_seq + self.rows):
            good = _dense(batches, first_seq + self.rows)
            table = self._table(batches[:good], columns)
        if table.num_rows:
            self.last_kind = table["kind"][-1].as_py()
            self.rows += table.num_rows
            self.tables.append(table if take is None else take(table))
        if good:
            self._move_on(buffer, frames[:good], batches[good - 1].num_rows == 0)
        if good < len(frames):
            expected = first_seq + self.rows
            raise FrameError(f"seq is not dense: a record batch does not begin with {expected} and count on")

    def _table(self, batches: Sequence[pa.RecordBatch], columns: list[str] | None) -> pa.Table:
        """The rows in one piece: a copy, so that the window's bytes are let go."""
        table = pa.Table.from_batches(batches, self.schema)
        return (table if columns is None else table.select(columns)).combine_chunks()

    def _move_on(self, buffer: pa.Buffer, frames: Sequence[Frame], empty: bool) -> None:
        rows_end = frames[-1].start if empty else frames[-1].end
        self.crc32 = zlib.crc32(memoryview(buffer)[frames[0].start : rows_end], self.crc32)
        self.rows_end = self.end - frames[0].start + rows_end
        self.end += frames[-1].end - frames[0].start
        self.continued = empty and CONTINUED_KEY.encode() in metadata_of(buffer, frames[-1])


def read_segment(
    path: Path,
    first_seq: int = 0,
    columns: list[str] | None = None,
    take: Take | None = None,
    check: Callable[[Segment], None] | None = None,
) -> Segment:
    """Read a file whose first row has `first_seq`; `check` may refuse its head before a row is read.

    ValueError when it is no log, or of another major schema.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            segment = read_head(path, file, size)
            if check is not None:
                check(segment)
            _read_rows(segment, file, first_seq, columns, take)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    return segment


def _read_rows(segment: Segment, file: BinaryIO, first_seq: int, columns: list[str] | None, take: Take | None) -> None:
    """Add what can be read after the head; `stopped` says why it is not all."""
    try:
        for buffer in _windows(segment, file):
            frames, ended, stopped = _good_frames(buffer, final=segment.end + buffer.size == segment.size)
            if frames:
                segment.append(buffer, frames, first_seq, columns, take)
            if stopped is not None:
                raise stopped
            if ended:
                _check_nothing_follows(segment, file)
                return
    except FrameError as error:
        torn = error.torn and not good_frame_follows(_rest(segment, file), 0)
        segment.stopped = FrameError(str(error), torn=torn)


def _windows(segment: Segment, file: BinaryIO) -> Iterator[pa.Buffer]:
    """Stretches of the file from `segment.end` on, which moves on meanwhile; a longer one where it did not."""
    length, before = _WINDOW, -1
    while segment.end < segment.size:
        length = length * 2 if segment.end == before else _WINDOW
        before = segment.end
        file.seek(before)
        wanted = min(length, segment.size - before)
        data = file.read(wanted)
        if len(data) < wanted:  # cut off while it is read
            segment.size = before + len(data)
        yield pa.py_buffer(data)


def _good_frames(buffer: pa.Buffer, *, final: bool) -> tuple[list[Frame], bool, FrameError | None]:
    """The good messages at the beginning, whether the stream's end follows them, and what is wrong there."""
    frames: list[Frame] = []
    at = 0
    try:
        while (frame := read_frame(buffer, at)) is not None:
            check_frame(buffer, frame)
            frames.append(frame)
            at = frame.end
    except FrameError as error:
        # What seems cut off may only reach into the next window.
        return frames, False, error if final or not error.torn else None
    return frames, at < buffer.size, None


def _check_nothing_follows(segment: Segment, file: BinaryIO) -> None:
    segment.end += len(END_OF_STREAM)
    if segment.end < segment.size:
        raise FrameError("bytes follow the end of the stream")


def _rest(segment: Segment, file: BinaryIO) -> pa.Buffer:
    file.seek(segment.end)
    return pa.py_buffer(file.read(segment.size - segment.end))


def _dense(batches: Sequence[pa.RecordBatch], first: int) -> int:
    """How many of the record batches continue `seq` without a gap."""
    for number, batch in enumerate(batches):
        if not continues(pa.table(batch), first):
            return number
        first += batch.num_rows
    return len(batches)


def continues(table: pa.Table, first: int) -> bool:
    """Whether `seq`, in one piece, counts on from `first`."""
    column = table["seq"].combine_chunks()
    if not table.num_rows:
        return True
    seq = np.frombuffer(column.buffers()[1], np.int64)[column.offset : column.offset + table.num_rows]
    return column.null_count == 0 and np.array_equal(seq, np.arange(first, first + table.num_rows))


def read_head(path: Path, file: BinaryIO, size: int) -> Segment:
    """The schema, checked."""
    buffer = pa.py_buffer(file.read(min(size, _WINDOW)))
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
        check_version(metadata, path)
        if schema_crc(schema, metadata) != metadata.get(CRC_KEY):
            raise FrameError("its schema's checksum is wrong")
    except FrameError as error:
        hint = "the file was cut off before its first row" if error.torn else "it was not written by fsm_trainer"
        raise ValueError(f"{path} is not a readable event log: {error} ({hint}, or is damaged)") from error
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path} is not a readable event log: its schema is invalid") from error
    check_columns(schema, path)
    crc = zlib.crc32(memoryview(buffer)[: frame.end])
    return Segment(path, size, schema, metadata, crc, frame.end, frame.end)


def check_version(metadata: dict[str, str], path: Path) -> None:
    """Raise ValueError for a major schema version that this code does not read, FrameError for no version at all."""
    version = metadata.get(VERSION_KEY)
    if version is None:
        raise FrameError(f"its schema has no {VERSION_KEY}")
    major = version.split(".")[0]
    if not (major.isascii() and major.isdecimal()):
        raise FrameError(f"its {VERSION_KEY} is {version!r}")
    known = int(SCHEMA_VERSION.split(".")[0])
    if int(major) != known:
        age = "newer" if int(major) > known else "older"
        raise ValueError(
            f"{path} has event log schema {version}, {age} than {SCHEMA_VERSION}, which this fsm_trainer reads; "
            f"use {'a newer' if int(major) > known else 'an older'} fsm_trainer"
        )


def check_columns(schema: pa.Schema, path: Path) -> None:
    """Raise ValueError for a required column that is missing, or one of another type."""
    for expected in SCHEMA:
        at = schema.get_field_index(expected.name)
        if (at < 0 and not expected.nullable) or (at >= 0 and schema.field(at).type != expected.type):
            raise ValueError(f"{path} is not an event log of schema {SCHEMA_VERSION}: column {expected.name} is wrong")
