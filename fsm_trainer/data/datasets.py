"""The dataset of a run: local files, hub names, and users' own loaders. Knows nothing of tokens or batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsm_trainer.data.readers import READERS, Row, read_rows
from fsm_trainer.data.user_code import UserCodeError, load_function, split_spec, where

if TYPE_CHECKING:
    from datasets import Dataset

LOADER_FUNCTION = "load_training_dataset"


class Rows(Protocol):
    """What a dataset must offer: a length and rows by number."""

    def __len__(self) -> int:
        """Rows there are."""

    def __getitem__(self, index: int, /) -> Any:
        """One row, a mapping."""


def default_loader(path: str) -> Dataset:
    """A `datasets.Dataset` of a local .jsonl or .json file, or of a hub dataset `NAME[:CONFIG[:SPLIT]]`."""
    if is_local(path):
        return _to_dataset(read_rows(_existing(path)), path)
    return _load_from_hub(path)


def is_local(path: str) -> bool:
    """Whether a text means a file: it exists, has a dataset's suffix, or is spelled as a path."""
    file = Path(path).expanduser()
    return file.exists() or file.suffix.lower() in READERS or path.startswith((".", "/", "~"))


def _existing(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.exists():
        raise ValueError(f"dataset {path} does not exist; give the path of a .jsonl or .json file")
    return file


def _to_dataset(rows: Sequence[Row], path: str) -> Dataset:
    from datasets import Dataset

    # Columns of every row, not only of the first: JSONL rows need not all have the same keys.
    columns = dict.fromkeys(key for row in rows for key in row)
    values = {key: [row.get(key) for row in rows] for key in columns}
    try:
        return Dataset.from_dict(values)
    except (TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())
        column = _odd_column(values)
        name = f"{column!r}, which" if column is not None else "that"
        raise ValueError(
            f"dataset {path} has a column {name} cannot be kept, because its values are not all of one type or too "
            f"large: {reason}; make them one type"
        ) from error


def _odd_column(columns: dict[str, list[Any]]) -> str | None:
    """The first column that Arrow does not take; its own messages do not name it."""
    from datasets import Dataset

    for name, values in columns.items():
        try:
            Dataset.from_dict({name: values})
        except (TypeError, ValueError, OverflowError):
            return name
    return None


def split_hub_name(name: str) -> tuple[str, str | None, str]:
    """Dataset, configuration and split of `NAME[:CONFIG[:SPLIT]]`."""
    parts = name.split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(f"dataset {name!r} is no file and no hub name, expected NAME[:CONFIG[:SPLIT]]")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    return parts[0], config, parts[2] if len(parts) == 3 and parts[2] else "train"


def _load_from_hub(name: str) -> Dataset:
    dataset, config, split = split_hub_name(name)
    # Never wait long for a hub that does not answer; the local cache is used when it is offline.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    from datasets import load_dataset

    try:
        return load_dataset(dataset, config, split=split)
    except (ConnectionError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"dataset {name!r} is no file here and the hub or its cache gave none: {reason}") from error


def load_training_rows(dataset_path: str, loader: str | None = None, **kwargs: Any) -> Rows:
    """Rows of a run, through the user's loader (`FILE.py[:FUNCTION]`) if there is one. Each row has a `prompt`.

    A loader is called `load_training_dataset(dataset_path, default_loader=..., **kwargs)`.
    """
    if loader is None:
        rows: Any = default_loader(dataset_path)
    else:
        rows = _call_loader(load_function(loader, LOADER_FUNCTION, "dataset loader"), loader, dataset_path, kwargs)
    check_rows(rows, loader or dataset_path)
    return rows  # type: ignore[no-any-return]


def _call_loader(function: Callable[..., Any], loader: str, dataset_path: str, kwargs: dict[str, Any]) -> Any:
    path, name = split_spec(loader, LOADER_FUNCTION)
    refusals: list[ValueError] = []

    def noted_default_loader(inner_path: str) -> Dataset:
        try:
            return default_loader(inner_path)
        except ValueError as error:
            refusals.append(error)
            raise

    try:
        return function(dataset_path, default_loader=noted_default_loader, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a script's own way out would end the command with that code and without a word.
        # A message of our own default loader says all there is to say; anything else is the user's code.
        if any(error is refusal for refusal in refusals):
            raise
        raise UserCodeError(f"dataset loader {path}:{name} failed: {where(error, path)}") from error


def check_rows(rows: Any, source: str) -> None:
    """Raise ValueError unless `rows` is a non-empty sequence of mappings with a usable `prompt` each."""
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__") or isinstance(rows, dict | str):
        raise ValueError(f"dataset {source} gave a {type(rows).__name__}, expected a Dataset or a list of rows")
    if _length(rows, source) == 0:
        raise ValueError(f"dataset {source} has no rows; give one with at least one batch of prompts")
    for index in range(len(rows)):
        _check_row(_row(rows, index, source), index, source)


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
    prompt = row["prompt"]
    if isinstance(prompt, str) and prompt:
        return
    if not isinstance(prompt, list) or not prompt or not all(isinstance(m, dict) and "role" in m for m in prompt):
        raise ValueError(
            f"dataset {source} row {index} has prompt {_short(prompt)}, expected a text or a list of chat messages"
        )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
