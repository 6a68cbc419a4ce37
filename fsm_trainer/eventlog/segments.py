"""The files that a log is being written into: messages go to the last one, and a full one is followed by another.

Knows nothing of rows or threads; whoever uses it sees to it that one thread at a time does.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from fsm_trainer.eventlog.frame import END_OF_STREAM, encode_batch
from fsm_trainer.eventlog.layout import lock, other_files, segment_path, sync_directory
from fsm_trainer.eventlog.schema import CONTINUED_KEY, FIRST_SEQ_KEY, PREVIOUS_KEY, SCHEMA, SEGMENT_KEY, run_schema


class SegmentWriter:
    """Creates the first file at once, with the schema in it. Every method may raise OSError.

    `fd` is the file written now; those before it are on the storage.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], max_bytes: int = 0) -> None:
        """`max_bytes` of a file, the last message excepted (0: no limit). FileExistsError over another log."""
        self.path = path
        self._metadata = dict(metadata)
        self._max_bytes = max_bytes
        self._number = self._size = self._crc = 0
        self._has_rows = False
        if others := other_files(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(others[0]))
        self._first_fd = self.fd = _create(path)
        # Held on the first file until the end, whichever file is written.
        lock(self._first_fd)
        try:
            self._begin({})
        except OSError:
            os.close(self.fd)
            raise

    def write(self, message: bytes, first_seq: int) -> None:
        """Append the message of a record batch whose first row is `first_seq`."""
        if self._max_bytes and self._has_rows and self._size + len(message) > self._max_bytes:
            self._rotate(first_seq)
        self._append(message)
        self._has_rows = True

    def end(self) -> None:
        """Mark the end of the stream."""
        self._append(END_OF_STREAM)

    def close(self) -> None:
        """Wait for the storage and close. FileNotFoundError if a file was deleted meanwhile."""
        try:
            os.fsync(self.fd)
            if 0 in (os.fstat(self._first_fd).st_nlink, os.fstat(self.fd).st_nlink):
                raise FileNotFoundError(errno.ENOENT, "it was deleted while the run wrote it")
        finally:
            os.close(self.fd)
            if self.fd != self._first_fd:
                os.close(self._first_fd)

    def _begin(self, more: Mapping[str, str]) -> None:
        self._size = self._crc = 0
        self._has_rows = False
        self._append(bytes(run_schema({**self._metadata, **more}).serialize()))

    def _append(self, data: bytes) -> None:
        _write_all(self.fd, data)
        self._size += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def _rotate(self, first_seq: int) -> None:
        """Open the next file, and only then say in this one that the log goes on there.

        So a crash in between leaves a file without rows, and a mark always has its file.
        """
        before, number = self.fd, self._number + 1
        os.fsync(before)
        self.fd = _create(segment_path(self.path, number))
        self._number = number
        place = {SEGMENT_KEY: str(number), FIRST_SEQ_KEY: str(first_seq), PREVIOUS_KEY: f"0x{self._crc:08x}"}
        try:
            self._begin(place)
            os.fsync(self.fd)
            sync_directory(self.path.parent)
            mark = encode_batch(pa.RecordBatch.from_pylist([], SCHEMA), first_seq, **{CONTINUED_KEY: str(number)})
            _write_all(before, mark + END_OF_STREAM)
            os.fsync(before)
        finally:
            if before != self._first_fd:
                os.close(before)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
