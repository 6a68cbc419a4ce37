"""The samples of a run as a data frame, each with how its batch ended. Knows nothing of how they were made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fsm_trainer.analysis.frames import ended_batches, load_events
from fsm_trainer.eventlog.layout import find_log

_ORDER = ["batch_id", "row", "sample"]


def load_samples(run: str | Path) -> pd.DataFrame:
    """All kept samples of a run directory, one row each, by batch, dataset row and sample, with Arrow dtypes.

    A file that was written before its batch ended says `open`; if the event log knows the end, that is put in.
    ValueError if there is no sample or no log.
    """
    folder = Path(run) if Path(run).is_dir() else find_log(run).parent
    table = _read(folder / "samples")
    frame: pd.DataFrame = table.to_pandas(types_mapper=pd.ArrowDtype)
    if (frame["state"] == "open").any():
        frame = _with_ends(frame, ended_batches(load_events(run)))
    ordered: pd.DataFrame = frame.sort_values(_ORDER, kind="stable", ignore_index=True)
    return ordered


def read_files(paths: Iterable[Path], columns: Sequence[str] | None = None) -> list[pa.Table]:
    """The samples in these files, of `columns` those that a file has. ValueError for one that is not whole."""
    return [table for path in paths if (table := _read_file(path, columns)) is not None]


def _read_file(path: Path, columns: Sequence[str] | None) -> pa.Table | None:
    try:
        file = pq.ParquetFile(path)
        there = file.schema_arrow.names
        return file.read(columns=None if columns is None else [name for name in columns if name in there])
    except FileNotFoundError:
        return None  # a run that is going on keeps the newest only
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is no whole Parquet file: {error}") from error


def _read(folder: Path) -> pa.Table:
    tables = read_files(sorted(folder.glob("*.parquet")))
    if not tables:
        raise ValueError(
            f"{folder} holds no samples: the run has generated none yet, or it was started with --log-samples none"
        )
    return pa.concat_tables(tables, promote_options="default")


def _with_ends(frame: pd.DataFrame, ends: pd.DataFrame) -> pd.DataFrame:
    known = ends.set_index("batch_id")[["state", "reason"]]
    is_open = (frame["state"] == "open") & frame["batch_id"].isin(known.index)
    for name in ("state", "reason"):
        frame.loc[is_open, name] = frame.loc[is_open, "batch_id"].map(known[name])
    return frame
