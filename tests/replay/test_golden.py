"""Logs of earlier versions are read and verified by this one, and the one that was edited is not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from fsm_trainer.analysis.summary import summarize, summarize_log
from fsm_trainer.core.events import RecordKind
from fsm_trainer.eventlog.compact import same_rows
from fsm_trainer.eventlog.layout import later_segments
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.replay.verify import verify
from fsm_trainer.replay.verify_text import render

GOLDEN = Path(__file__).parents[1] / "golden"
LOGS = sorted(path for path in GOLDEN.glob("*/*") if path.is_dir())
VERSIONS = sorted(path for path in GOLDEN.iterdir() if path.is_dir() and path.name != "schema-1.0")
OUTCOMES = {"failure": "failed", "stop": "interrupted"}


def name_of(path: Path) -> str:
    return f"{path.parent.name}-{path.name}"


@pytest.mark.parametrize("run", [log for log in LOGS if log.name != "edited"], ids=name_of)
def test_a_golden_log_is_read_and_verified(run: Path) -> None:
    result = verify(run)
    assert result.ok, render(result)
    assert result.complete
    assert result.decisions > 4 * result.inputs > 0
    summary = summarize(run)
    assert summary.outcome == OUTCOMES.get(run.name, "completed")
    assert summary == summarize_log(read_log(run)), "it reads all the columns that it needs"
    assert summary.events == result.inputs + result.decisions + result.metrics


@pytest.mark.parametrize("run", [log for log in LOGS if (log / "events.arrows").is_file()], ids=name_of)
def test_a_golden_stream_holds_what_arrow_itself_reads(run: Path) -> None:
    log = read_log(run)
    tables = [pa.ipc.open_stream(path).read_all() for path in (log.path, *later_segments(log.path))]
    raw = pa.concat_tables(tables)
    assert same_rows(
        log.table.select(raw.column_names), pa.table(dict(zip(raw.column_names, raw.columns, strict=True)))
    )


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_the_edited_log_diverges_where_it_was_edited(version: Path) -> None:
    original, edited = (list(records(read_log(version / name).table)) for name in ("paced", "edited"))
    (at,) = [i for i, rows in enumerate(zip(original, edited, strict=True)) if rows[0] != rows[1]]
    result = verify(version / "edited")
    assert result.divergence is not None
    assert (result.divergence.seq, result.divergence.columns) == (at, ("dest",))
    assert result.divergence.expected == original[at]
    assert read_log(version / "edited").problem is None, "its checksums are right"


@pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
def test_the_golden_logs_hold_what_can_happen(version: Path) -> None:
    logs = {path.name: read_log(path) for path in version.iterdir()}
    assert {log.scheduler_config["admission"] for log in logs.values()} == {"paced", "greedy", "lockstep"}
    assert (logs["lockstep"].path.suffix, logs["stop"].path.suffix) == (".arrow", ".parquet")
    assert later_segments(logs["paced"].path)
    rows = [row for log in logs.values() for row in records(log.table)]
    assert {row.kind for row in rows} == set(RecordKind) - {RecordKind.IGNORED}
    assert {row.reason for row in rows if row.kind is RecordKind.DROP} == {"stale", "degenerate", "no_step"}
    assert any(row.kind is RecordKind.METRIC and row.value is not None for row in records(logs["real"].table))


def test_a_log_of_the_older_minor_schema_has_nulls_for_what_came_later() -> None:
    log = read_log(GOLDEN / "schema-1.0" / "paced")
    assert log.schema_version == "1.0"
    assert log.table["numerator"].null_count == log.table["denominator"].null_count == log.table.num_rows > 0
