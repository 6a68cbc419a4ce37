"""Reading with `take`: every row comes by once, in order, and what is said of the log is as without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from fsm_trainer.eventlog import stream
from fsm_trainer.eventlog.reader import read_log
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter
from tests.analysis.worlds import records_of


@pytest.mark.parametrize("segment_bytes", [0, 20_000])
def test_take_sees_all_rows_and_keeps_what_it_returns(
    segment_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_WINDOW", 30_000)
    config, records = records_of("paced")
    path = tmp_path / LOG_NAME
    with EventLogWriter(path, metadata=log_metadata(config, {}), max_rows=64, segment_bytes=segment_bytes) as log:
        for record in records:
            log.append(record)
    seen: list[int] = []

    def take(table: pa.Table) -> pa.Table:
        seen.extend(table["seq"].to_pylist())
        return table.filter(pc.equal(table["kind"], "version"))

    whole, some = read_log(path), read_log(path, columns=["train_version"], take=take)
    assert seen == list(range(len(records)))
    assert some.complete
    assert replace(some, table=None) == replace(whole, table=None)
    assert some.table["kind"].unique().to_pylist() == ["version"]
    wanted = whole.table.filter(pc.equal(whole.table["kind"], "version"))
    assert some.table.equals(wanted.select(["seq", "kind", "train_version"]))
