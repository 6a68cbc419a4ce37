"""What the rows of a dataset must look like, however they were made. Knows nothing of files, tokens or batches."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Rows(Protocol):
    """What a dataset must offer: a length and rows by number."""

    def __len__(self) -> int:
        """Rows there are."""

    def __getitem__(self, index: int, /) -> Any:
        """One row, a mapping."""


def check_rows(rows: Any, source: str) -> None:
    """Raise ValueError unless `rows` is a non-empty sequence of mappings with a usable `prompt` each."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or isinstance(rows, dict | str):
        raise ValueError(f"dataset {source} gave a {type(rows).__name__}, expected a Dataset or a list of rows")
    length = _length(rows, source)
    if length == 0:
        raise ValueError(f"dataset {source} has no rows; give one with at least one batch of prompts")
    # The first one whole, so that a message can name all its columns.
    _check_row(_row(rows, 0, source), 0, source)
    for index, row in enumerate(_needed(rows, source)):
        _check_row(row, index, source)


def column(rows: Rows, name: str) -> Sequence[Any]:
    """One column of rows that have been checked."""
    if _is_table(rows):
        found: Sequence[Any] = rows[name][:]  # type: ignore[index]
        return found
    return [rows[index][name] for index in range(len(rows))]


def rows_at(rows: Rows, indices: Sequence[int]) -> tuple[dict[str, Any], ...]:
    """Rows by number, as plain dictionaries."""
    if not _is_table(rows):
        return tuple(dict(rows[index]) for index in indices)
    columns: dict[str, list[Any]] = rows[list(indices)]  # type: ignore[index]
    return tuple(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))


def _is_table(rows: Any) -> bool:
    """Whether it is a `datasets.Dataset`, whose columns are read in a tenth of the time of its rows."""
    return hasattr(rows, "select_columns") and hasattr(rows, "column_names")


def _needed(rows: Any, source: str) -> Iterator[Any]:
    if _is_table(rows):
        yield from rows.select_columns([name for name in ("prompt", "solutions") if name in rows.column_names])
    else:
        yield from (_row(rows, index, source) for index in range(len(rows)))


def _length(rows: Any, source: str) -> int:
    try:
        return len(rows)
    except Exception as error:  # a user's class may raise anything
        raise ValueError(f"dataset {source} has no length: {type(error).__name__}: {error}") from error


def _row(rows: Any, index: int, source: str) -> Any:
    try:
        return rows[index]
    except Exception as error:  # a user's class, or a table whose [] gives columns, as pandas' does
        raise ValueError(
            f"dataset {source} (a {type(rows).__name__}) gives no row {index}: {type(error).__name__}: {error}; give a "
            f"Dataset (Dataset.from_pandas of a frame) or a list of rows"
        ) from error


def _check_row(row: Any, index: int, source: str) -> None:
    if not hasattr(row, "keys"):
        raise ValueError(f"dataset {source} row {index} is a {type(row).__name__}, expected a mapping with a prompt")
    if "prompt" not in row:
        raise ValueError(
            f"dataset {source} row {index} has no `prompt` column, only {', '.join(map(str, row)) or 'nothing'}; "
            f"rename the column or give --dataset-loader-fn"
        )
    problem = _prompt_problem(row["prompt"])
    if problem:
        raise ValueError(f"dataset {source} row {index} column prompt {problem}")
    solutions = row.get("solutions")
    if solutions is not None and not isinstance(solutions, str | list | tuple | numbers.Number):
        raise ValueError(
            f"dataset {source} row {index} column solutions is {_short(solutions)}, expected a list of answers or one"
        )


def _prompt_problem(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "is empty, expected a text or a list of chat messages"
    if not isinstance(prompt, list) or not prompt:
        return f"is {_short(prompt)}, expected a text or a list of chat messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            return f"message {number} is {_short(message)}, expected an object with role and content"
    return None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
