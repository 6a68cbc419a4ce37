"""Follows a log while it is written: each look reads only what came since the last one, across its files.

Knows nothing of what the rows mean, except that `run_end` is the last.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from fsm_trainer.core.events import RecordKind
from fsm_trainer.eventlog import compacted
from fsm_trainer.eventlog.chain import check_place
from fsm_trainer.eventlog.frame import Frame, FrameError, check_frame, good_frame_follows, metadata_of, read_frame
from fsm_trainer.eventlog.layout import find_log, is_locked, segment_path
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.eventlog.schema import CONTINUED_KEY
from fsm_trainer.eventlog.stream import Segment, continues, read_head

_WINDOW = 4 << 20
"""Bytes read at a time, unless a message is longer."""


class LogFollower:
    """One log from its first row on. Raises ValueError when it is none, or of another major schema."""

    _head: Segment
    """The head of the file being read, and the checksum of what was read of it."""

    def __init__(self, run: str | Path, columns: Sequence[str]) -> None:
        """`columns` of `Record` to read, `kind` among them."""
        assert "kind" in columns
        self.path = find_log(run)
        self.complete = False
        """The last row read is `run_end`."""
        self.problem: str | None = None
        """What is wrong with the bytes that come next; nothing more is read then."""
        self._columns = list(columns)
        self._number = self._at = self._rows = 0
        self._window = _WINDOW
        self._is_compacted = compacted.is_compacted(self.path)
        if self._is_compacted:
            self.metadata = read_log(self.path, columns=[]).metadata
        else:
            self._open(self.path)
            self.metadata = self._head.metadata

    @property
    def writing(self) -> bool:
        """A live process writes the log. Ask before `new_rows`, or an end in between looks like a crash."""
        return not self._is_compacted and is_locked(self.path)

    def new_rows(self) -> Iterator[pa.Table]:
        """The rows since the last call, in stretches; a row batch that is half written is left for the next."""
        if self.complete or self.problem is not None:
            return
        if self._is_compacted:
            yield self._seen(read_log(self.path, columns=self._columns).table.select(self._columns))
            return
        while (buffer := self._next_bytes()) is not None:
            batches: list[pa.RecordBatch] = []
            try:
                for frame in self._frames(buffer):
                    batches.append(self._batch(frame))
            except FrameError as error:
                if not error.torn or good_frame_follows(buffer, self._taken):
                    self.problem = f"reading stopped at byte {self._at + self._taken} of {self._file.name}: {error}"
            at_mark, self._at = self._goes_on, self._at + self._taken
            if batches:
                yield self._seen(pa.Table.from_batches(batches, self._head.schema).select(self._columns))
            if self.problem is not None:
                return
            if at_mark:
                self._number += 1
                try:
                    self._open(segment_path(self.path, self._number))
                except (FrameError, OSError, ValueError) as error:
                    self.problem = f"the log does not go on after {self._file.name}: {error}"
                    return
            elif not batches and self._window == _WINDOW:
                return

    def _open(self, path: Path) -> None:
        with path.open("rb") as file:
            head = read_head(path, file, path.stat().st_size)
        if self._number:
            check_place(head, self._number, self._rows, self._head)
        self._file, self._head, self._at = path, head, head.end
        self._window = _WINDOW

    def _next_bytes(self) -> pa.Buffer | None:
        """A stretch of the file after what was read; None if there is nothing new."""
        with self._file.open("rb") as file:
            file.seek(self._at)
            data = file.read(self._window)
        return pa.py_buffer(data) if data else None

    def _frames(self, buffer: pa.Buffer) -> Iterator[Frame]:
        """The whole, good messages with rows. FrameError, perhaps torn, at what is none; sets how far they reach."""
        self._taken, self._goes_on = 0, False
        while (frame := self._frame(buffer)) is not None:
            check_frame(buffer, frame)
            if CONTINUED_KEY.encode() in metadata_of(buffer, frame):
                self._taken, self._goes_on = frame.end, True
                return
            yield frame
            self._head.crc32 = zlib.crc32(memoryview(buffer)[frame.start : frame.end], self._head.crc32)
            self._taken = frame.end

    def _batch(self, frame: Frame) -> pa.RecordBatch:
        """The rows of a message; FrameError if they do not continue those before."""
        batch = pa.ipc.read_record_batch(frame.message, self._head.schema)
        if not continues(pa.table(batch), self._rows):
            raise FrameError(f"seq is not dense: a record batch does not begin with {self._rows} and count on")
        self._rows += batch.num_rows
        return batch

    def _frame(self, buffer: pa.Buffer) -> Frame | None:
        try:
            frame = read_frame(buffer, self._taken)
        except FrameError:
            # A message longer than the window looks torn for ever: look further next time.
            whole = buffer.size < self._window
            self._window = _WINDOW if whole or self._taken else self._window * 2
            raise
        self._window = _WINDOW
        return frame

    def _seen(self, table: pa.Table) -> pa.Table:
        if table.num_rows:
            self.complete = table["kind"][-1].as_py() == RecordKind.RUN_END.value
        return table
