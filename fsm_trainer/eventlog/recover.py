"""Cuts off what a crash left at the end of a log, after keeping a copy of it.

The copy is on the storage before anything is cut, so a crash in between loses nothing, and recovering again goes on.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from fsm_trainer.core.events import RecordKind
from fsm_trainer.eventlog import compacted
from fsm_trainer.eventlog.chain import Chain, read_chain
from fsm_trainer.eventlog.layout import find_log, locked, sync_directory
from fsm_trainer.eventlog.reader import read_log


@dataclass(frozen=True)
class Recovery:
    """What `recover` found and did."""

    path: Path
    events: int
    """Rows of the log, before and after."""
    complete: bool
    """The last of them is `run_end`."""
    removed_bytes: int
    """Bytes that were cut off; 0 if nothing was to be done."""
    copies: tuple[Path, ...]
    """Where they are kept."""
    problem: str | None
    """What was wrong with them."""


def recover(run: str | Path, *, force: bool = False) -> Recovery:
    """Cut a torn tail off a run's log, after copying it to `events.arrows.torn-N`.

    `force` also cuts at bytes that are wrong or a file that is missing, and loses the good rows after them. ValueError
    if there is no log, the run is still going, the log is damaged and not `force`, or a file cannot be written.
    """
    path = find_log(run)
    if compacted.is_compacted(path):
        log = read_log(path)  # its checksum says that nothing is to be done, or that nothing can be done
        return Recovery(path, log.table.num_rows, log.complete, 0, (), None)
    try:
        with locked(path, "recover it"):
            return _recover(path, force)
    except OSError as error:
        raise ValueError(f"cannot recover {path}: {error.strerror or error}") from error


def _recover(path: Path, force: bool) -> Recovery:
    chain = read_chain(path, writing=False, columns=["seq", "kind"])
    rows, stopped, complete = chain.rows, chain.stopped, chain.last_kind == RecordKind.RUN_END.value
    if stopped is None:
        return Recovery(path, rows, complete, 0, (), None)
    if not stopped.torn and not force:
        raise ValueError(
            f"{path} is damaged after row {rows - 1}, not only cut off, and is left as it is: {stopped}; "
            f"restore it from a copy, or give --force to lose what follows"
        )
    copies = _set_aside(path, chain)
    return Recovery(path, rows, complete, sum(copy.stat().st_size for copy in copies), tuple(copies), str(stopped))


def _set_aside(path: Path, chain: Chain) -> list[Path]:
    """Copy what is to be cut off, then cut; later files first, so that the log is a good beginning at any moment."""
    last = chain.segments[-1]
    # The mark that the log goes on must not stay without the file it names.
    cut = last.rows_end if last.continued else last.end
    copies = []
    for unread in reversed(chain.unread):
        copies.append(_free_name(unread))
        unread.rename(copies[-1])
    if cut < last.size:
        copies.append(_copy_tail(last.path, cut))
        sync_directory(path.parent)
        with last.path.open("r+b") as file:
            file.truncate(cut)
            os.fsync(file.fileno())
    sync_directory(path.parent)
    return copies


def _copy_tail(path: Path, start: int) -> Path:
    """Keep the bytes from `start` on, under a name that exists only once they are all there."""
    copy = _free_name(path)
    temporary = copy.with_name(f".{copy.name}.part")
    try:
        with path.open("rb") as source, temporary.open("wb") as file:
            source.seek(start)
            shutil.copyfileobj(source, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(copy)
    finally:
        temporary.unlink(missing_ok=True)
    return copy


def _free_name(path: Path) -> Path:
    number = 1
    while (name := path.with_name(f"{path.name}.torn-{number}")).exists():
        number += 1
    return name
