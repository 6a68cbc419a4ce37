"""Where the frames take their rows from: a log's file, a log that was read, or its events as a frame.

A frame needs few rows and columns of a log, so they are picked out as Arrow first; pandas never sees the rest. Nothing
here knows what a row means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.eventlog.reader import EventLog, read_log

Run = str | Path | EventLog | pd.DataFrame
"""A run directory or log file, a log that `read_log` read, or the events that `load_events` loaded."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NS = 1e9


@dataclass(frozen=True)
class Source:
    """The rows of one log. `start_ns` and `end_ns` are the moments of its first and its last row."""

    table: pa.Table
    start_ns: int
    end_ns: int

    @classmethod
    def of(cls, run: Run | Source) -> Source:
        """The rows of a run, in whichever form it is given. ValueError if it is no run, or a frame lacks columns."""
        if isinstance(run, Source):
            return run
        if isinstance(run, pd.DataFrame):
            table = _table_of(run)
        else:
            table = (run if isinstance(run, EventLog) else read_log(run)).table
        moments = table["t_ns"]
        if not len(moments):
            return cls(table, 0, 0)
        return cls(table, moments[0].as_py(), moments[-1].as_py())

    def rows(self, columns: Sequence[str], kinds: Sequence[str], **among: Sequence[str]) -> Rows:
        """The rows of these kinds in which the columns of `among` hold one of their values, in order."""
        mask = pc.is_in(self.table["kind"], value_set=pa.array(kinds))
        for name, values in among.items():
            mask = pc.and_(mask, pc.is_in(self.table[name], value_set=pa.array(values)))
        return Rows(self.table.select(list(columns)).filter(mask).combine_chunks(), self.start_ns)


@dataclass(frozen=True)
class Rows:
    """Some rows of a log, with their columns as numpy arrays."""

    table: pa.Table
    start_ns: int

    def __len__(self) -> int:
        """How many."""
        return int(self.table.num_rows)

    def where(self, mask: Mask) -> Rows:
        """Those for which the mask is true."""
        return Rows(self.table.filter(pa.array(mask)).combine_chunks(), self.start_ns)

    def equal(self, **wanted: str) -> Mask:
        """Where the columns hold these values."""
        mask = np.ones(len(self), dtype=bool)
        for name, value in wanted.items():
            mask &= _numpy(pc.fill_null(pc.equal(self.table[name], value), False))
        return mask

    def present(self, name: str) -> Mask:
        """Where the column is not null."""
        return np.asarray(_numpy(self.table[name].is_valid()), dtype=bool)

    def ints(self, name: str, null: int = -1) -> Ints:
        """An integer column, with `null` for null."""
        return np.asarray(_numpy(pc.fill_null(self.table[name], null)), dtype=np.int64)

    def floats(self, name: str) -> Floats:
        """A column of numbers, with nan for null."""
        return np.asarray(_numpy(self.table[name].cast(pa.float64(), safe=False)), dtype=np.float64)

    def seconds(self, name: str = "t_ns") -> Floats:
        """Moments as seconds since the log's first row, with nan for null."""
        # Subtracted as integers: a clock's nanoseconds may be more than a float holds exactly.
        since = (self.ints(name) - self.start_ns) / NS
        return np.where(self.present(name), since, np.nan)

    def texts(self, name: str) -> pd.Categorical:
        """A text column; few values, many rows."""
        encoded = self.table[name].dictionary_encode().combine_chunks()
        if isinstance(encoded, pa.ChunkedArray):  # no rows, no chunk
            return pd.Categorical([])
        codes = np.asarray(encoded.indices.fill_null(-1))
        return pd.Categorical.from_codes(codes, categories=pd.Index(encoded.dictionary.to_pylist(), dtype=object))


def nullable(values: Ints | Floats, known: Mask) -> pd.Series:
    """Whole numbers that may be unknown, as `Int64`."""
    whole = np.where(known, values, 0).astype(np.int64)
    values_or_na: pd.Series = pd.Series(pd.arrays.IntegerArray(whole, ~known))
    return values_or_na


def _table_of(frame: pd.DataFrame) -> pa.Table:
    if not {"seq", "t_ns", "kind"} <= set(frame.columns):
        raise ValueError(
            f"the frame has the columns {', '.join(map(str, frame.columns))[:80]}, expected those of an event log; "
            f"give what load_events returns"
        )
    return pa.Table.from_pandas(frame, preserve_index=False)


def _numpy(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
