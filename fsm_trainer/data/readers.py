"""Local dataset files by suffix; a broken file is named with its line or row. Knows nothing of prompts or hubs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

Row = dict[str, Any]

_TEXT_COLUMNS = ("prompt", "solutions", "solution", "answer")
"""Columns of CSV files that stay as they are written: `007` is no number there."""


def read_file(path: Path) -> Dataset:
    """The dataset of a local file. ValueError for an unknown suffix and for what is not in that format."""
    read = TABLE_READERS.get(path.suffix.lower())
    if read is None:
        return _to_dataset(read_rows(path), path)
    from datasets import Dataset

    try:
        table = read(path)
    except OSError as error:  # Arrow's own has no errno, and its message begins with the path
        reason = error.strerror or " ".join(str(error).split())
        raise ValueError(f"dataset {path} cannot be read: {reason}; give a whole file you may read") from error
    except ValueError as error:  # Arrow's errors are
        raise ValueError(f"dataset {path} is not {path.suffix[1:]}: {' '.join(str(error).split())}") from error
    twice = [name for name in table.column_names if table.column_names.count(name) > 1]
    if twice:
        raise ValueError(f"dataset {path} has two columns named {twice[0]!r}; rename one")
    return Dataset(table)


def read_rows(path: Path) -> list[Row]:
    """Rows of a local file. Raises ValueError for an unknown suffix, a folder, or text that is not JSON objects."""
    if path.is_dir():
        raise ValueError(f"dataset {path} is a folder, expected a file ending in {FORMATS}")
    reader = ROW_READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"dataset {path} ends in {path.suffix or 'nothing'!r}, expected {FORMATS}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"dataset {path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"dataset {path} cannot be read: {error.strerror}; give a file you may read") from error
    return reader(path, text)


def _read_jsonl(path: Path, text: str) -> list[Row]:
    rows = []
    # Only "\n" ends a line: splitlines() would also cut at separators that JSON allows inside a string.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(_row(_parse(line, path, number), f"{path} line {number}"))
    return rows


def _read_json(path: Path, text: str) -> list[Row]:
    value = _parse(text, path, 1)
    if not isinstance(value, list):
        raise ValueError(f"dataset {path} holds a {type(value).__name__}, expected a list of objects")
    return [_row(item, f"{path} item {number}") for number, item in enumerate(value, start=1)]


def _parse(text: str, path: Path, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ValueError(f"dataset {path} line {line} is not valid JSON: {error.msg} (column {error.colno})") from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits, or brackets nested thousands deep: JSON, but nothing that can be kept.
        raise ValueError(f"dataset {path} line {first_line} or later holds what cannot be read: {error}") from error


def _row(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"dataset {place} holds a {type(value).__name__}, expected an object with a prompt")
    return value


def _to_dataset(rows: list[Row], path: Path) -> Dataset:
    from datasets import Dataset

    # Columns of every row, not only of the first: JSONL rows need not all have the same keys.
    columns = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row.get(key) for row in rows] for key in columns}
    try:
        return Dataset.from_dict(values)
    except (TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        odd = _odd_value(values)
        name = f"{odd[0]!r}, which" if odd is not None else "that"
        where = f"; row {odd[1]} is the first that does not fit" if odd is not None else ""
        raise ValueError(
            f"dataset {path} has a column {name} cannot be kept, because its values are not all of one type or too "
            f"large: {reason}{where}; make them one type"
        ) from error


def _odd_value(columns: dict[str, list[Any]]) -> tuple[str, int] | None:
    """The first column, and row, that Arrow does not take; its own messages do not name them."""
    for name, values in columns.items():
        if _fits(name, values):
            continue
        good, bad = 0, len(values)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if _fits(name, values[:middle]) else (good, middle)
        return name, bad - 1
    return None


def _fits(name: str, values: list[Any]) -> bool:
    from datasets import Dataset

    try:
        Dataset.from_dict({name: values})
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _read_parquet(path: Path) -> pa.Table:
    import pyarrow.parquet as pq

    # As one file, not as a folder of a data set: `a=1/x.parquet` must not grow a column a.
    return pq.ParquetFile(path).read()


def _read_arrow(path: Path) -> pa.Table:
    import pyarrow as pa

    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        # Feather and IPC files; what the datasets library caches are streams.
        return (pa.ipc.open_file if magic == b"ARROW1" else pa.ipc.open_stream)(file).read_all()


def _read_separated(path: Path, *, separator: str) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv

    return csv.read_csv(
        path,
        # One thread: only then the messages name the row.
        read_options=csv.ReadOptions(use_threads=False),
        parse_options=csv.ParseOptions(delimiter=separator, newlines_in_values=True),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(_TEXT_COLUMNS, pa.string())),
    )


ROW_READERS: dict[str, Callable[[Path, str], list[Row]]] = {".jsonl": _read_jsonl, ".json": _read_json}
"""Suffix -> reader of text; a further format is one more entry."""

TABLE_READERS: dict[str, Callable[[Path], pa.Table]] = {
    ".parquet": _read_parquet,
    ".csv": partial(_read_separated, separator=","),
    ".tsv": partial(_read_separated, separator="\t"),
    ".arrow": _read_arrow,
    ".feather": _read_arrow,
}
"""The same for tables."""

SUFFIXES = (*ROW_READERS, *TABLE_READERS)
FORMATS = ".jsonl, .json, .parquet, .csv, .tsv, .arrow or .feather"
