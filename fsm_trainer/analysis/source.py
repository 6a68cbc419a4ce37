"""Where the frames take their rows from: a log's file, a log that was read, or its events as a frame.

A frame needs few rows and columns of a log. They are picked out as Arrow, of a file while it is read, so that the
memory taken is that of what is needed; pandas never sees the rest. Nothing here knows what a row means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from fsm_trainer.eventlog.reader import EventLog, read_log
from fsm_trainer.eventlog.schema import SCHEMA

Run = str | Path | EventLog | pd.DataFrame
"""A run directory or log file, a log that `read_log` read, or the events that `load_events` loaded."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NS = 1e9


class Pick(NamedTuple):
    """Some columns of the rows of some kinds, and, if `among` says so, only of those with one of the values given."""

    columns: tuple[str, ...]
    kinds: tuple[str, ...]
    among: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def names(self) -> set[str]:
        """All columns that it looks at."""
        return {*self.columns, "kind", *(name for name, _ in self.among)}

    def of(self, table: pa.Table) -> pa.Table:
        """The rows of a table that has these columns, in order."""
        mask = pc.is_in(table["kind"], value_set=pa.array(self.kinds))
        for name, values in self.among:
            mask = pc.and_(mask, pc.is_in(table[name], value_set=pa.array(values)))
        return table.select(list(self.columns)).filter(mask)


class _Picker:
    """Makes some picks of a log while it is read, a stretch at a time, with texts as dictionaries."""

    def __init__(self, picks: Sequence[Pick]) -> None:
        self.names = set[str]().union({"t_ns"}, *(pick.names for pick in picks))
        self.parts: dict[Pick, list[pa.Table]] = {pick: [] for pick in picks}
        self.start_ns: int | None = None
        self.end_ns: int | None = None

    def __call__(self, table: pa.Table) -> pa.Table:
        """Take a stretch; nothing else of it is kept."""
        if table.num_rows:
            self.start_ns = table["t_ns"][0].as_py() if self.start_ns is None else self.start_ns
            self.end_ns = table["t_ns"][-1].as_py()
        table = _without_batch_names(_with_columns(table, self.names))
        for pick, parts in self.parts.items():
            parts.append(_encoded(pick.of(table)))
        # Not a slice of it, which would hold all its memory.
        return table.schema.empty_table()

    def tables(self) -> dict[Pick, pa.Table]:
        """What was picked."""
        whole = {pick: pa.concat_tables(parts).unify_dictionaries() for pick, parts in self.parts.items()}
        return {pick: table.combine_chunks() for pick, table in whole.items()}


@dataclass(frozen=True)
class Source:
    """The rows of one log. `start_ns` and `end_ns` are the moments of its first and its last row."""

    table: pa.Table | None
    """All rows; None if only `picked` were read."""
    start_ns: int
    end_ns: int
    picked: Mapping[Pick, pa.Table] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run | Source, picks: Sequence[Pick] = ()) -> Source:
        """The rows of a run; of a file only these picks, if any are given. ValueError if it is no run."""
        if isinstance(run, Source):
            return run
        if isinstance(run, str | Path) and picks:
            return cls._of_file(run, picks)
        if isinstance(run, str | Path):
            run = read_log(run)
        table = _table_of(run) if isinstance(run, pd.DataFrame) else run.table
        moments = table["t_ns"]
        return cls(table, moments[0].as_py(), moments[-1].as_py()) if len(moments) else cls(table, 0, 0)

    @classmethod
    def _of_file(cls, run: str | Path, picks: Sequence[Pick]) -> Source:
        picker = _Picker(picks)
        read_log(run, columns=sorted(picker.names), take=picker)
        return cls(None, picker.start_ns or 0, picker.end_ns or 0, picker.tables())

    def take(self, pick: Pick) -> Rows:
        """The rows of a pick."""
        if self.table is None:
            return Rows(self.picked[pick], self.start_ns)
        if lacking := sorted(pick.names - set(self.table.column_names)):
            raise ValueError(f"the events lack {', '.join(lacking)}, which this frame needs; load them whole")
        return Rows(pick.of(self.table).combine_chunks(), self.start_ns)

    def rows(self, columns: Sequence[str], kinds: Sequence[str]) -> Rows:
        """The rows of some kinds, of a source that has all."""
        return self.take(Pick(tuple(columns), tuple(kinds)))


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

    def among(self, name: str, values: Sequence[str]) -> Mask:
        """Where the column holds one of these values."""
        return np.asarray(_numpy(pc.is_in(self.table[name], value_set=pa.array(values))), dtype=bool)

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


def _with_columns(table: pa.Table, names: set[str]) -> pa.Table:
    """The table with those of the columns that an older minor schema lacks, as nulls."""
    for column in SCHEMA:
        if column.name in names and column.name not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, column.type))
    return table


def _without_batch_names(table: pa.Table) -> pa.Table:
    """Each batch has a name of its own, which its number says already: their dictionary would be as long as the log."""
    if not {"machine", "entity"} <= set(table.column_names):
        return table
    of_batch = pc.fill_null(pc.equal(table["machine"], "batch"), False)
    named = pc.if_else(of_batch, pa.scalar(None, pa.utf8()), table["entity"])
    return table.set_column(table.column_names.index("entity"), "entity", named)


def _encoded(table: pa.Table) -> pa.Table:
    for number, column in enumerate(table.schema):
        if column.type == pa.utf8():
            table = table.set_column(number, column.name, table.column(number).dictionary_encode())
    return table.combine_chunks()


def _table_of(frame: pd.DataFrame) -> pa.Table:
    if not {"seq", "t_ns", "kind"} <= set(frame.columns):
        raise ValueError(
            f"the frame has the columns {', '.join(map(str, frame.columns))[:80]}, expected those of an event log; "
            f"give what load_events returns"
        )
    return pa.Table.from_pandas(frame, preserve_index=False)


def _numpy(column: Any) -> Any:
    return column.to_numpy(zero_copy_only=False) if isinstance(column, pa.Array) else column.to_numpy()
