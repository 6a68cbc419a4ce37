"""Where the frames take their rows from: a log's file, a log that was read, or its events as a frame.

A frame needs few rows and columns of a log. They are picked out as Arrow, of a file while it is read, so that the
memory taken is that of what is needed; pandas never sees the rest. Nothing here knows what a row means.
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


_TEXTS = ("kind", "machine", "entity", "trigger", "source", "dest", "reason")
_COLUMNS = (
    *("seq", "t_ns", *_TEXTS, "cause_seq", "batch_id", "engine", "rollout_version_first", "rollout_version_last"),
    *("train_version", "tokens", "started_ns", "finished_ns", "value", "numerator", "denominator"),
)
"""All that the frames look at."""


class _Picked:
    """Keeps the rows of some kinds, texts as dictionaries, and the moments of the first and the last row of all."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = pa.array(kinds)
        self.start_ns = self.end_ns = 0
        self._begun = False

    def __call__(self, table: pa.Table) -> pa.Table:
        """Take a stretch of the log."""
        if table.num_rows:
            self.end_ns = table["t_ns"][-1].as_py()
            self.start_ns = self.start_ns if self._begun else table["t_ns"][0].as_py()
            self._begun = True
        table = table.filter(pc.is_in(table["kind"], value_set=self._kinds))
        # Every batch has its own name, which its number says already.
        of_batch = pc.equal(table["machine"], "batch")
        named = pc.if_else(pc.fill_null(of_batch, False), pa.scalar(None, pa.utf8()), table["entity"])
        table = table.set_column(table.column_names.index("entity"), "entity", named)
        for name in _TEXTS:
            table = table.set_column(table.column_names.index(name), name, table[name].dictionary_encode())
        return table.combine_chunks()


@dataclass(frozen=True)
class Source:
    """The rows of one log. `start_ns` and `end_ns` are the moments of its first and its last row."""

    table: pa.Table
    start_ns: int
    end_ns: int

    @classmethod
    def of(cls, run: Run | Source, kinds: Sequence[str] | None = None) -> Source:
        """The rows of a run; of a file only those of `kinds`, if given. ValueError if it is no run, or no log's."""
        if isinstance(run, Source):
            return run
        if isinstance(run, str | Path) and kinds is not None:
            picked = _Picked(kinds)
            table = read_log(run, columns=_COLUMNS, take=picked).table.unify_dictionaries()
            return cls(table, picked.start_ns, picked.end_ns)
        if isinstance(run, str | Path):
            run = read_log(run)
        table = _table_of(run) if isinstance(run, pd.DataFrame) else run.table
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
        column = self.table[name]
        encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        if not len(self):
            return pd.Categorical([])
        encoded = encoded.combine_chunks()
        codes = np.asarray(encoded.indices.fill_null(-1))
        words = pd.Index(encoded.dictionary.to_pylist(), dtype=object)
        used = words[np.unique(codes[codes >= 0])].sort_values()
        found: pd.Categorical = pd.Categorical.from_codes(codes, categories=words).set_categories(used)
        return found


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
