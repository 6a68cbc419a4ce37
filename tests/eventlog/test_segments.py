"""A log in several files is read like one, and a file that is missing, doubled, swapped or foreign is found."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from fsm_trainer.core.events import Record
from fsm_trainer.eventlog import segments as segments_module
from fsm_trainer.eventlog import stream as stream_module
from fsm_trainer.eventlog.chain import read_chain
from fsm_trainer.eventlog.layout import later_segments
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.writer import EventLogError, EventLogWriter, write_log
from tests.eventlog.written import LIMIT, METADATA, write_segments

RowMaker = Callable[[int], list[Record]]


@pytest.fixture(scope="module")
def rows(make_rows: RowMaker) -> list[Record]:
    return make_rows(100)


@pytest.fixture
def files(tmp_path: Path, rows: list[Record]) -> list[Path]:
    found = write_segments(tmp_path / "events.arrows", rows)
    assert len(found) >= 4
    return found


def assert_prefix(run: Path, rows: list[Record], problem: str, *, damaged: bool = True) -> int:
    """The log reads as a true beginning, and says what is wrong; how many rows of it."""
    log = read_log(run)
    found = list(records(log.table))
    assert found == rows[: len(found)]
    assert len(found) < len(rows)
    assert (log.damaged, log.complete) == (damaged, False)
    assert log.problem is not None
    assert problem in log.problem
    assert log.dropped_bytes > 0 or "missing" in log.problem
    return len(found)


def test_files_read_as_one_log(files: list[Path], rows: list[Record]) -> None:
    log = read_log(files[0].parent)
    assert list(records(log.table)) == rows
    assert (log.complete, log.problem, log.dropped_bytes, log.damaged) == (True, None, 0, False)
    assert [path.name for path in files[:3]] == ["events.arrows", "events-00001.arrows", "events-00002.arrows"]
    assert all(path.stat().st_size < LIMIT + 5000 for path in files), "the limit, the mark and the head"


def test_every_file_is_an_arrow_stream_of_its_rows(files: list[Path], rows: list[Record]) -> None:
    tables = [pa.ipc.open_stream(path).read_all() for path in files]
    assert [seq for table in tables for seq in table["seq"].to_pylist()] == list(range(len(rows)))


def test_a_log_within_the_limit_is_one_file(tmp_path: Path, rows: list[Record]) -> None:
    assert write_segments(tmp_path / "log", rows, limit=1 << 20) == [tmp_path / "log"]
    assert read_log(tmp_path / "log").complete


def test_a_missing_file_is_found_wherever_it_is(files: list[Path], rows: list[Record]) -> None:
    for path in files[1:]:
        kept = path.read_bytes()
        path.unlink()
        assert_prefix(files[0], rows, f"{path.name}, which is missing")
        path.write_bytes(kept)
    files[0].unlink()
    with pytest.raises(ValueError, match=r"holds no events\.arrows"):
        read_log(files[0].parent)
    shutil.copy(files[1], files[0])
    with pytest.raises(ValueError, match="is a later file of a log"):
        read_log(files[0])


def test_doubled_and_swapped_files_are_found(files: list[Path], rows: list[Record]) -> None:
    first, second, third = (path.read_bytes() for path in files[1:4])
    for one, two, problem in ((first, first, "expected file 2"), (second, first, "expected file 1")):
        files[1].write_bytes(one)
        files[2].write_bytes(two)
        assert_prefix(files[0], rows, problem)
    files[1].write_bytes(first)
    files[2].write_bytes(second)
    files[3].write_bytes(third)
    assert read_log(files[0]).complete


def test_a_file_of_another_run_is_found(files: list[Path], rows: list[Record], tmp_path: Path) -> None:
    others = [row._replace(t_ns=row.t_ns + 1) for row in rows]
    foreign = write_segments(tmp_path / "other", others)
    for mine, theirs in zip(files[1:], foreign[1:], strict=True):
        kept = mine.read_bytes()
        shutil.copy(theirs, mine)
        assert_prefix(files[0], rows, "does not continue")
        mine.write_bytes(kept)


def test_cut_of_each_file_reads_as_a_prefix(files: list[Path], rows: list[Record]) -> None:
    for number, path in enumerate(files):
        whole = path.read_bytes()
        for size in range(0 if number else 3500, len(whole), 97):
            path.write_bytes(whole[:size])
            log = read_log(files[0])
            found = list(records(log.table))
            assert found == rows[: len(found)]
            last = number == len(files) - 1
            assert log.complete == (len(found) == len(rows))
            assert log.problem is not None or last, (number, size)
            assert log.damaged or last, "a crash cuts the last file only"
        path.write_bytes(whole)


def test_flips_in_each_file_are_noticed(files: list[Path], rows: list[Record]) -> None:
    for path in files:
        whole = path.read_bytes()
        for at in range(5000, len(whole) - 8, 211):
            data = bytearray(whole)
            data[at] ^= 1 << at % 8
            path.write_bytes(data)
            assert_prefix(files[0], rows, "reading stopped")
        path.write_bytes(whole)


class Writes:
    """Lets so many writes through, then dies like a killed process: nothing later is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.left = limit
        self._write = os.write
        monkeypatch.setattr(segments_module.os, "write", self)

    def __call__(self, fd: int, data: memoryview) -> int:
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.left -= 1
        return self._write(fd, data)


def test_a_crash_at_any_moment_of_a_rotation_is_a_torn_log(
    tmp_path: Path, rows: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = set()
    for limit in range(1, 16):
        path = tmp_path / f"{limit}" / "events.arrows"
        path.parent.mkdir()
        with monkeypatch.context() as patch:
            Writes(patch, limit)
            with pytest.raises(EventLogError, match="No space left"):
                write_segments(path, rows)
        log = read_log(path)
        found = list(records(log.table))
        assert found == rows[: len(found)]
        assert len(found) % 10 == 0
        assert (log.complete, log.damaged) == (False, False)
        notes.add("begun" if "was begun" in (log.problem or "") else log.problem)
    assert notes == {None, "begun"}


def test_a_reader_sees_a_rotation_of_a_live_run_as_no_problem(tmp_path: Path, rows: list[Record]) -> None:
    """The next file is there a moment before this one says so."""
    path = tmp_path / "events.arrows"
    with EventLogWriter(path, metadata=METADATA, flush_interval_s=3600) as writer:
        writer.append(rows[0])
        writer.flush()
        (tmp_path / "events-00001.arrows").write_bytes(b"")
        log = read_log(path)
        assert (log.state, log.problem, log.table.num_rows) == ("running", None, 1)
    assert "was begun" in (read_log(path).problem or "")


def test_a_reader_beside_the_writer_always_sees_a_true_beginning(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(300)
    path = tmp_path / "events.arrows"
    opened, ended = threading.Event(), threading.Event()

    def write() -> None:
        with EventLogWriter(path, metadata=METADATA, flush_interval_s=3600, segment_bytes=LIMIT) as writer:
            opened.set()
            for row in rows:
                writer.append(row)
                if row.seq % 5 == 4:
                    writer.flush()
        ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert opened.wait(timeout=30)
    looks = 0
    while not ended.is_set() or not looks:
        log = read_log(path)
        assert list(records(log.table)) == rows[: log.table.num_rows]
        assert not log.damaged, log.problem
        looks += 1
    thread.join(timeout=30)
    assert read_log(path).complete
    assert len(later_segments(path)) > 9


def test_a_new_log_does_not_mix_with_files_that_are_there(files: list[Path], tmp_path: Path) -> None:
    files[0].unlink()
    with pytest.raises(ValueError, match="already holds an event log"):
        EventLogWriter(files[0], metadata=METADATA)
    assert not files[0].exists()


def test_messages_longer_than_a_window_and_windows_within_messages(
    files: list[Path], rows: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = files[0].parent / "one"
    write_log(one, rows, METADATA, max_rows=7)
    for window in (4096, 5000, 9001):
        monkeypatch.setattr(stream_module, "_WINDOW", window)
        for path in (one, files[0]):
            log = read_log(path)
            assert list(records(log.table)) == rows
            assert log.problem is None
    data = one.read_bytes()
    (files[0].parent / "cut").write_bytes(data[:-700])
    log = read_log(files[0].parent / "cut")
    assert (log.damaged, log.table.num_rows) == (False, 98)


def test_columns_may_be_picked(files: list[Path]) -> None:
    log = read_log(files[0], columns=["value"])
    assert log.table.column_names == ["seq", "kind", "value"]
    assert log.complete
    assert [segment.rows for segment in read_chain(files[0], writing=False).segments][0] > 0
