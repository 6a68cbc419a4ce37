"""Writes a log in several files."""

from __future__ import annotations

from pathlib import Path

from fsm_trainer.core.events import Record
from fsm_trainer.eventlog.layout import later_segments
from fsm_trainer.eventlog.writer import EventLogWriter

METADATA = {"fsm.config_json": "{}"}
LIMIT = 12_000
"""Bytes of a file: two to three record batches of ten rows."""


def write_segments(path: Path, rows: list[Record], limit: int = LIMIT) -> list[Path]:
    """Write the rows ten a batch; the files."""
    with EventLogWriter(path, metadata=METADATA, flush_interval_s=3600, segment_bytes=limit) as writer:
        for row in rows:
            writer.append(row)
            if row.seq % 10 == 9:
                writer.flush()
    return [path, *later_segments(path)]
