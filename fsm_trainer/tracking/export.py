"""A finished run's numbers for other tools: points for the trackers, the frames for Parquet and CSV."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.analysis import batches_frame, residency_frame, staleness_frame, steps_frame, sync_frame
from fsm_trainer.eventlog.reader import EventLog, records
from fsm_trainer.tracking.points import KINDS, Point, PointStream
from fsm_trainer.tracking.trackers import TRACKERS, RunInfo, check_installed

FORMATS = (*TRACKERS, "parquet", "csv")
FRAMES = {
    "steps": steps_frame,
    "batches": batches_frame,
    "staleness": staleness_frame,
    "residency": residency_frame,
    "sync": sync_frame,
}
"""Name of the file -> the frame in it."""


def export_log(log: EventLog, form: str, folder: Path) -> dict[str, Any]:
    """Write a run's numbers in one of `FORMATS` into the folder; what was written: files and rows, or points.

    ValueError if the folder holds such an export already, or the tracker's package is missing.
    """
    if form not in TRACKERS:
        return _to_files(log, form, folder)
    check_installed(form)
    return _to_tracker(log, form, folder)


def points_of(log: EventLog) -> Iterator[Point]:
    """The points of a log."""
    stream = PointStream()
    wanted = pc.is_in(log.table["kind"], value_set=pa.array([kind.value for kind in KINDS]))
    for record in records(log.table.filter(wanted)):
        yield from stream.take(record)
    yield from stream.close()


def _to_tracker(log: EventLog, form: str, folder: Path) -> dict[str, Any]:
    if form != "tensorboard":  # the others put each run beside those before, in places of their own
        count = _track(log, form, folder)
    else:
        _refuse_existing(folder.glob("events.out.tfevents.*"))
        with _aside(folder) as aside:
            count = _track(log, form, aside)
    return {"to": form, "folder": str(folder), "points": count}


def _track(log: EventLog, form: str, folder: Path) -> int:
    tracker = TRACKERS[form](_info(log, folder))
    count = 0
    for point in points_of(log):
        tracker.log(point)
        count += 1
    tracker.close()
    return count


def _info(log: EventLog, folder: Path) -> RunInfo:
    """The run as a tracker is told of it. The log's last write tells when its clock began."""
    last_ns = log.table["t_ns"][-1].as_py() if log.table.num_rows else 0
    started_s = log.path.stat().st_mtime - last_ns / 1e9
    return RunInfo(log.path.absolute().parent.name, folder, started_s, log.run_config, offline=True)


def _to_files(log: EventLog, form: str, folder: Path) -> dict[str, Any]:
    paths = {name: folder / f"{name}.{form}" for name in FRAMES}
    _refuse_existing(path for path in paths.values() if path.exists())
    rows = {}
    with _aside(folder) as aside:
        for name, path in paths.items():
            frame = FRAMES[name](log)
            _write(frame, aside / path.name, form)
            rows[path.name] = len(frame)
    return {"to": form, "folder": str(folder), "rows": rows}


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A hidden folder in this one, whose files are moved up once all are written; else nothing is left of them."""
    made = not folder.exists()
    aside = folder / f".partial-{os.getpid()}"
    try:
        aside.mkdir(parents=True)
        yield aside
        for path in sorted(aside.iterdir()):
            path.replace(folder / path.name)
        aside.rmdir()
    except BaseException:
        shutil.rmtree(folder if made else aside, ignore_errors=True)
        raise


def _refuse_existing(found: Iterator[Path]) -> None:
    for path in found:
        raise ValueError(f"{path} exists already; choose another folder with -o, or remove it")


def _write(frame: pd.DataFrame, path: Path, form: str) -> None:
    if form == "csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)
