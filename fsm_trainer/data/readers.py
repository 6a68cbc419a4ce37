"""Rows of local dataset files by suffix; a broken file is named with its line. Knows nothing of prompts or hubs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Rows of a local file. Raises ValueError for an unknown suffix, a folder, or text that is not JSON objects."""
    if path.is_dir():
        raise ValueError(f"dataset {path} is a folder, expected a file ending in {', '.join(READERS)}")
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise ValueError(f"dataset {path} ends in {path.suffix or 'nothing'!r}, expected {' or '.join(READERS)}")
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


READERS: dict[str, Callable[[Path, str], list[Row]]] = {".jsonl": _read_jsonl, ".json": _read_json}
"""Suffix -> reader; a further format is one more entry."""
