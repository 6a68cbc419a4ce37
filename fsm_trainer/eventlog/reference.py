"""The published forms of the event log's schema, made from the code: `schemas/event_log.json`, `.md` and `.arrows`.

`python -m fsm_trainer.eventlog.reference` rewrites them; a test keeps them current.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsm_trainer.core.events import RecordKind
from fsm_trainer.eventlog.frame import END_OF_STREAM
from fsm_trainer.eventlog.schema import (
    BATCH_METADATA,
    COLUMNS,
    KINDS,
    METADATA,
    SCHEMA,
    SCHEMA_VERSION,
    SEGMENT_METADATA,
    VERSION_KEY,
)

FOLDER = "schemas"
FORMAT = "Apache Arrow IPC stream, no compression, no dictionaries"


def describe() -> dict[str, Any]:
    """The schema for programs."""
    return {
        "name": "fsm_trainer event log",
        "version": SCHEMA_VERSION,
        "format": FORMAT,
        "columns": [
            {"name": field.name, "type": str(field.type), "nullable": field.nullable, "meaning": COLUMNS[field.name]}
            for field in SCHEMA
        ],
        "kinds": {kind.value: KINDS[kind] for kind in RecordKind},
        "schema_metadata": METADATA,
        "segment_metadata": SEGMENT_METADATA,
        "batch_metadata": BATCH_METADATA,
    }


def page() -> str:
    """The schema for people: tables of columns, kinds and metadata."""
    columns = ((f"`{f.name}`", f"{f.type}{'' if f.nullable else ', never null'}", COLUMNS[f.name]) for f in SCHEMA)
    return "\n".join(
        [
            f"# Event log, schema {SCHEMA_VERSION}",
            "",
            f"Made by `make docs` from `fsm_trainer/eventlog/schema.py`. Format: {FORMAT}.",
            "docs/event-log.md says which columns a row of each kind fills in; event_log.arrows is a log without rows.",
            "",
            *_table("Columns", ("column", "type", "meaning"), columns),
            *_table("Kinds", ("kind", "what the row records"), _named({k.value: KINDS[k] for k in RecordKind})),
            *_table("Metadata of the schema", ("key", "value"), _named(METADATA)),
            *_table("Further metadata of a later file of the log", ("key", "value"), _named(SEGMENT_METADATA)),
            *_table("Metadata of each record batch", ("key", "value"), _named(BATCH_METADATA)),
        ]
    )


def stream() -> bytes:
    """A log without rows: the schema as Arrow itself has it."""
    return bytes(SCHEMA.with_metadata({VERSION_KEY: SCHEMA_VERSION}).serialize()) + END_OF_STREAM


def write(root: Path) -> None:
    """Rewrite the published forms below the repository's root."""
    folder = root / FOLDER
    (folder / "event_log.json").write_text(json.dumps(describe(), indent=2) + "\n", encoding="utf-8")
    (folder / "event_log.md").write_text(page(), encoding="utf-8")
    (folder / "event_log.arrows").write_bytes(stream())


def _named(values: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    return ((f"`{name}`", meaning) for name, meaning in values.items())


def _table(title: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(cells) + " |" for cells in (heads, *rows)]
    return [f"## {title}", "", lines[0], "|" + "---|" * len(heads), *lines[1:], ""]


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2])
