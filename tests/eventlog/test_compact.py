"""A compacted log reads like the stream it was made of; the stream goes only once that is certain."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog import compact as compact_module
from fsm_trainer.eventlog import compacted
from fsm_trainer.eventlog.compact import compact, same_rows
from fsm_trainer.eventlog.layout import COMPACT_NAMES
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import SCHEMA, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter, to_batch, write_log
from tests.eventlog.written import write_segments

RowMaker = Callable[[int], list[Record]]
METADATA = log_metadata(SchedulerConfig(), {"seed": 3})
FORMS = list(COMPACT_NAMES)


@pytest.fixture(scope="module")
def rows(make_rows: RowMaker) -> list[Record]:
    """With nan, which no two numbers share."""
    rows = make_rows(300)
    rows[7] = rows[7]._replace(value=float("nan"), numerator=-0.0)
    return rows


@pytest.fixture
def run(tmp_path: Path, rows: list[Record]) -> Path:
    write_log(tmp_path / "events.arrows", rows, METADATA, max_rows=40)
    return tmp_path


@pytest.mark.parametrize("form", FORMS)
def test_a_compacted_log_is_the_same_log(run: Path, rows: list[Record], form: str) -> None:
    before = read_log(run)
    size = (run / "events.arrows").stat().st_size
    done = compact(run, form)
    assert [path.name for path in run.iterdir()] == [COMPACT_NAMES[form]]
    assert (done.path, done.events, done.bytes_before) == (run / COMPACT_NAMES[form], 300, size)
    assert done.bytes_after == done.path.stat().st_size < size / 5
    for place in (run, done.path):
        log = read_log(place)
        assert log.metadata == before.metadata
        assert log.table.schema == before.table.schema
        assert list(map(repr, records(log.table))) == list(map(repr, rows))
        assert (log.complete, log.problem, log.damaged, log.state, log.compacted) == (True, None, False, "ended", True)
    assert read_log(run, columns=["value"]).table.column_names == ["seq", "kind", "value"]


def test_other_readers_read_it(run: Path, tmp_path: Path) -> None:
    path = compact(run).path
    table = pa.ipc.open_file(path).read_all()
    assert table["seq"].to_pylist() == list(range(300))
    assert pa.types.is_dictionary(table["kind"].type)
    (tmp_path / "b").mkdir()
    write_log(tmp_path / "b" / "events.arrows", list(records(read_log(run).table)), METADATA)
    assert parquet.read_table(compact(tmp_path / "b", "parquet").path)["message"].type == pa.utf8()


@pytest.mark.parametrize("form", FORMS)
def test_every_changed_byte_is_noticed(run: Path, form: str) -> None:
    path = compact(run, form).path
    whole = path.read_bytes()
    for at in range(8, len(whole), max(1, len(whole) // 400)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        path.write_bytes(data)
        with pytest.raises(ValueError, match="damaged"):
            read_log(run)
    for size in range(8, len(whole), len(whole) // 50):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged"):
            read_log(run)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="damaged"):
        read_log(run)


def test_several_files_become_one(tmp_path: Path, make_rows: RowMaker) -> None:
    files = write_segments(tmp_path / "events.arrows", make_rows(100))
    assert len(files) > 2
    compact(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events.arrow"]
    assert list(records(read_log(tmp_path).table)) == make_rows(100)


def test_an_interrupted_removal_is_finished(tmp_path: Path, make_rows: RowMaker) -> None:
    """Killed with any number of the stream's files gone: both readable, and compacting again ends it."""
    rows = make_rows(100)
    files = write_segments(tmp_path / "events.arrows", rows)
    kept = [path.read_bytes() for path in files]
    compact(tmp_path)
    for left in range(1, len(files) + 1):
        for path, data in zip(files[:left], kept, strict=False):
            path.write_bytes(data)
        assert list(records(read_log(tmp_path).table)) == rows
        assert compact(tmp_path).bytes_before == sum(len(data) for data in kept[:left])
        assert [path.name for path in tmp_path.iterdir()] == ["events.arrow"]


def test_a_removal_that_fails_on_the_way_leaves_no_file_behind_for_good(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_segments(tmp_path / "events.arrows", make_rows(100))
    for fails_at in reversed(files):

        def unlink(path: Path, missing_ok: bool = False, fails_at: Path = fails_at) -> None:
            if path == fails_at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            if path.exists():
                os.unlink(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", unlink)
            with pytest.raises(ValueError, match="cannot compact"):
                compact(tmp_path)
        assert read_log(tmp_path).complete
    compact(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["events.arrow"]


def test_a_compacted_file_of_another_run_saves_the_stream(run: Path, rows: list[Record], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    write_log(tmp_path / "other" / "events.arrows", [row._replace(t_ns=1) for row in rows], METADATA)
    compact(tmp_path / "other").path.rename(run / "events.arrow")
    with pytest.raises(ValueError, match="does not hold the rows"):
        compact(run)
    assert (run / "events.arrows").exists()


def test_nothing_to_do_for_a_compacted_log(run: Path) -> None:
    path = compact(run, "parquet").path
    before = path.read_bytes()
    again = compact(run, "arrow")
    assert (again.path, again.bytes_before, again.events) == (path, 0, 300)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="'zip', expected one of arrow, parquet"):
        compact(run, "zip")


def test_a_crashed_log_is_compacted_and_still_says_so(tmp_path: Path, rows: list[Record]) -> None:
    write_log(tmp_path / "events.arrows", rows[:50], METADATA)
    compact(tmp_path)
    log = read_log(tmp_path)
    assert (log.state, log.table.num_rows) == ("crashed", 50)


def test_torn_and_damaged_logs_are_left_alone(run: Path) -> None:
    path = run / "events.arrows"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-300] ^= 1
    for data, problem in ((whole[:-300], "fsm-replay recover"), (bytes(flipped), "is damaged")):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=problem):
            compact(run)
        assert [(p.name, p.read_bytes()) for p in run.iterdir()] == [("events.arrows", data)]


def test_a_copy_that_is_not_the_same_saves_the_stream(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compacted.encode
    monkeypatch.setattr(compacted, "encode", lambda table, metadata, form: real(table.slice(1), metadata, form))
    with pytest.raises(ValueError, match="does not hold the rows"):
        compact(run)
    assert [path.name for path in run.iterdir()] == ["events.arrows"]


def test_a_full_disk_saves_the_stream(run: Path, rows: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(compact_module.os, "fsync", fail)
        with pytest.raises(ValueError, match="cannot compact .*No space left on device"):
            compact(run)
    assert [path.name for path in run.iterdir()] == ["events.arrows"]
    assert read_log(run).table.num_rows == len(rows)


def test_a_new_run_does_not_mix_with_a_compacted_log(run: Path) -> None:
    compact(run)
    with pytest.raises(ValueError, match="already holds an event log"):
        EventLogWriter(run / "events.arrows", metadata=METADATA)


def test_same_rows_sees_every_difference(rows: list[Record]) -> None:
    one = pa.table(to_batch(rows))
    assert same_rows(one, pa.table(to_batch(list(rows))))
    for name in SCHEMA.names:
        at = next((i for i, row in enumerate(rows) if getattr(row, name) is not None), 0)
        old = getattr(rows[at], name)
        new = "x" if SCHEMA.field(name).type == pa.utf8() else 12345 if old is None else old + 1
        for value in {new, None} if SCHEMA.field(name).nullable and old is not None else {new}:
            other = [*rows[:at], rows[at]._replace(**{name: value}), *rows[at + 1 :]]
            if other[at].kind == "x":
                continue
            assert not same_rows(one, pa.table(to_batch(other))), (name, value)
    zero = [*rows[:7], rows[7]._replace(numerator=0.0), *rows[8:]]
    assert not same_rows(one, pa.table(to_batch(zero))), "0 and -0 have other bits"
    assert not same_rows(one, one.slice(1))
    assert not same_rows(one, one.drop_columns(["value"]))
