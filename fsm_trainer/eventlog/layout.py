"""Which files make up one log, and the lock that says that a process is at work on it.

A log begins in `events.arrows`; a long one goes on in `events-00001.arrows` and so on. A compacted one is a single
file. This module reads and writes none of them.
"""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsm_trainer.eventlog.schema import LOG_NAME

COMPACT_NAMES: dict[str, str] = {"arrow": "events.arrow", "parquet": "events.parquet"}
"""File names of a compacted log by format."""


def find_log(run: str | Path) -> Path:
    """The log's (first) file of a run directory, or the file itself; ValueError if there is none."""
    path = Path(run)
    if path.is_dir():
        # A compacted file is there only once it is whole, so it goes before a stream that may be half removed.
        for name in (*COMPACT_NAMES.values(), LOG_NAME):
            if (path / name).is_file():
                return path / name
        raise ValueError(f"{path} is not a run directory: it holds no {LOG_NAME}")
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a run directory or its {LOG_NAME}")
    return path


def segment_path(first: Path, index: int) -> Path:
    """The file of one segment of a log, counted from 0."""
    return first if index == 0 else first.with_name(f"{first.stem}-{index:05d}{first.suffix}")


def later_segments(first: Path) -> list[Path]:
    """The files after the first that are there, in order."""
    return sorted(first.parent.glob(f"{glob.escape(first.stem)}-[0-9][0-9][0-9][0-9][0-9]{glob.escape(first.suffix)}"))


def other_files(first: Path) -> list[Path]:
    """What a new log beginning in `first` would be mixed up with: segments of another, a compacted one."""
    compacted = [first.with_name(name) for name in COMPACT_NAMES.values()] if first.name == LOG_NAME else []
    return [path for path in (*later_segments(first), *compacted) if path.exists()]


def is_locked(path: Path) -> bool:
    """Whether a process holds the log open for writing. False too where the file system has no locks."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock(fd: int) -> None:
    """Tell readers that this process writes; a file system without locks only loses that."""
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def locked(path: Path, deed: str) -> Iterator[None]:
    """Keep others from changing a log; ValueError, naming the `deed` that must wait, if a process is at it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{path} is still being written, or another command is at it; {deed} once the run has ended"
            ) from error
        yield


def sync_directory(path: Path) -> None:
    """Bring names that were made, changed or removed in a directory to the storage."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
