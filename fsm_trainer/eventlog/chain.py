"""Reads the files of a log one after the other, each held against the end of the one before.

So a file that is missing, doubled, swapped or of another run is found, and never read as if it belonged there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fsm_trainer.eventlog.frame import FrameError
from fsm_trainer.eventlog.layout import later_segments, segment_path
from fsm_trainer.eventlog.schema import FIRST_SEQ_KEY, PREVIOUS_KEY, SEGMENT_KEY
from fsm_trainer.eventlog.stream import Segment, Take, read_segment


@dataclass(frozen=True)
class Chain:
    """The readable files of a log, in order."""

    segments: list[Segment]
    stopped: FrameError | None
    """Why reading stopped before the end of what is there."""
    unread: list[Path]
    """Files of the log that were not read, since what comes before them is not whole."""

    @property
    def rows(self) -> int:
        """Good rows in all of them."""
        return sum(segment.rows for segment in self.segments)

    @property
    def last_kind(self) -> str | None:
        """The kind of the last row; None without any."""
        return next((s.last_kind for s in reversed(self.segments) if s.last_kind is not None), None)

    @property
    def dropped_bytes(self) -> int:
        """Bytes that could not be used."""
        last = self.segments[-1]
        return last.size - last.end + sum(path.stat().st_size for path in self.unread)


def read_chain(first: Path, *, writing: bool, columns: list[str] | None = None, take: Take | None = None) -> Chain:
    """Read a log from its first file on. ValueError when that one is no log.

    While the run is still `writing`, the next file may be there a moment before this one is closed.
    """
    segments = [read_segment(first, columns=columns, take=take)]
    if SEGMENT_KEY in segments[0].metadata:
        raise ValueError(f"{first} is a later file of a log; give the run directory or the log's first file")
    rows = segments[0].rows
    stopped = None
    while segments[-1].continued and segments[-1].stopped is None:
        try:
            segment = _read_next(first, segments, rows, columns, take)
        except (FrameError, ValueError) as error:
            stopped = FrameError(str(error))
            break
        segments.append(segment)
        rows += segment.rows
    unread = [path for path in later_segments(first) if path not in [segment.path for segment in segments]]
    if stopped is None:
        stopped = _ending(segments[-1], [] if writing else unread)
    return Chain(segments, stopped, unread)


def _read_next(
    first: Path, segments: list[Segment], rows: int, columns: list[str] | None, take: Take | None
) -> Segment:
    """The file after those read; FrameError or ValueError if it is not the right one."""
    last, number = segments[-1], len(segments)
    path = segment_path(first, number)
    if not path.is_file():
        raise FrameError(f"the log goes on in {path.name}, which is missing")
    return read_segment(path, rows, columns, take, check=lambda segment: check_place(segment, number, rows, last))


def check_place(segment: Segment, number: int, rows: int, last: Segment) -> None:
    """Raise FrameError unless the file's head says that it continues the last one."""
    name, found = segment.path.name, segment.metadata
    if found.get(SEGMENT_KEY) != str(number):
        raise FrameError(f"{name} is file {found.get(SEGMENT_KEY, '0')} of a log, expected file {number}")
    if (found.get(FIRST_SEQ_KEY), found.get(PREVIOUS_KEY)) != (str(rows), f"0x{last.crc32:08x}"):
        raise FrameError(f"{name} does not continue {last.path.name}")
    if not segment.schema.equals(last.schema):
        raise FrameError(f"{name} has other columns than {last.path.name}")


def _ending(last: Segment, unread: list[Path]) -> FrameError | None:
    """What is wrong at the end of the last file that could be read, given files after it."""
    if not unread:
        return last.stopped
    # A crash between opening a file and closing the one before leaves a file without rows, or a part of its head.
    if last.stopped is None and len(unread) == 1 and not _holds_rows(unread[0]):
        return FrameError(f"{unread[0].name} was begun, and nothing written into it", torn=True)
    why = "does not say that the log goes on" if last.stopped is None else str(last.stopped)
    return FrameError(f"{why}, though {unread[0].name} is there")


def _holds_rows(path: Path) -> bool:
    try:
        segment = read_segment(path)
    except ValueError:
        # A file's head and its first rows are written apart, the head first; without it there is nothing.
        return False
    return segment.size > segment.end or segment.rows > 0 or segment.stopped is not None
