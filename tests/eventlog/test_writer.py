"""What is appended is read back, when it reaches the file, and how failures of the file surface."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record, RecordKind
from fsm_trainer.core.machines import TrainerState
from fsm_trainer.eventlog import writer as writer_module
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.schema import log_metadata
from fsm_trainer.eventlog.writer import EventLogError, EventLogWriter, write_log

RowMaker = Callable[[int], list[Record]]
FOREVER_S = 3600.0
"""Flush interval with which the flusher does nothing by itself within a test."""

METADATA = log_metadata(SchedulerConfig(), {})


def open_log(path: Path, max_rows: int = 256, flush_interval_s: float = FOREVER_S) -> EventLogWriter:
    return EventLogWriter(path, metadata=METADATA, max_rows=max_rows, flush_interval_s=flush_interval_s)


class Writes:
    """Stands in for os.write: tells when one is done, and can fail or write short."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.done = threading.Semaphore(0)
        self.limit = 1 << 30
        self.fail_from: int | None = None
        self._write = os.write
        monkeypatch.setattr(writer_module.os, "write", self)

    def __call__(self, fd: int, data: memoryview) -> int:
        if self.fail_from is not None and len(self.sizes) >= self.fail_from:
            self.done.release()
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(fd, data[: self.limit])
        self.sizes.append(written)
        self.done.release()
        return written


def test_round_trip_of_every_type_and_null(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(600)
    write_log(tmp_path / "log", rows, METADATA, max_rows=64)
    log = read_log(tmp_path / "log")
    assert list(records(log.table)) == rows
    assert all(type(row.kind) is RecordKind for row in records(log.table))
    assert (log.complete, log.state, log.dropped_bytes, log.problem, log.damaged) == (True, "ended", 0, None, False)


def test_enum_values_are_written_as_their_text(tmp_path: Path) -> None:
    row = Record(0, 1, RecordKind.RUN_END, source=TrainerState.WAITING)
    write_log(tmp_path / "log", [row], METADATA)
    log = read_log(tmp_path / "log")
    assert log.table["source"].to_pylist() == ["waiting"]
    assert log.table["kind"].to_pylist() == ["run_end"]


def test_any_arrow_reader_reads_the_log_and_the_batch_metadata(tmp_path: Path, make_rows: RowMaker) -> None:
    path = tmp_path / "log"
    write_log(path, make_rows(10), METADATA, max_rows=4)
    with pa.ipc.open_stream(path) as stream:
        batches = list(stream.iter_batches_with_custom_metadata())
    found = [(b.custom_metadata[b"first_seq"], b.custom_metadata[b"rows"]) for b in batches]
    assert found == [(b"0", b"4"), (b"4", b"4"), (b"8", b"2")]
    assert all(b.custom_metadata[b"crc32"].startswith(b"0x") for b in batches)


def test_schema_is_in_the_file_before_any_row(tmp_path: Path) -> None:
    with open_log(tmp_path / "log") as writer:
        log = read_log(tmp_path / "log")
        assert log.metadata["fsm.config_json"] == METADATA["fsm.config_json"]
        assert (log.table.num_rows, log.complete, log.state) == (0, False, "running")
        writer.flush()
    assert read_log(tmp_path / "log").state == "crashed"


def test_flush_makes_rows_readable_at_once(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(5)
    with open_log(tmp_path / "log") as writer:
        for row in rows[:3]:
            writer.append(row)
        assert read_log(tmp_path / "log").table.num_rows == 0
        writer.flush()
        assert list(records(read_log(tmp_path / "log").table)) == rows[:3]


def test_sync_has_the_flusher_bring_everything_to_the_storage(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = threading.Event()
    monkeypatch.setattr(writer_module, "_datasync", lambda fd: stored.set())
    with open_log(tmp_path / "log") as writer:
        for row in make_rows(4):
            writer.append(row)
        writer.sync()
        assert stored.wait(timeout=30)
        assert read_log(tmp_path / "log").table.num_rows == 4


def test_flusher_writes_a_full_batch_without_being_asked(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    with open_log(tmp_path / "log", max_rows=4) as writer:
        assert writes.done.acquire(timeout=30), "the schema is written at open"
        for row in make_rows(4):
            writer.append(row)
        assert writes.done.acquire(timeout=30), "a full batch is written"
        assert read_log(tmp_path / "log").table.num_rows == 4


def test_flusher_writes_rows_past_the_interval(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    with open_log(tmp_path / "log", flush_interval_s=0.001) as writer:
        assert writes.done.acquire(timeout=30)
        writer.append(make_rows(2)[0])
        assert writes.done.acquire(timeout=30), "one row is written though the batch is not full"


def test_one_write_per_batch_of_at_most_max_rows(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    monkeypatch.setattr(EventLogWriter, "_flush_old_rows", lambda self: None)
    with open_log(tmp_path / "log", max_rows=4) as writer:
        for row in make_rows(10):
            writer.append(row)
    assert len(writes.sizes) == 1 + 3 + 1, "schema, batches of 4, 4 and 2 rows, end of stream"


def test_short_writes_are_continued(tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    Writes(monkeypatch).limit = 100
    rows = make_rows(20)
    with open_log(tmp_path / "log") as writer:
        for row in rows:
            writer.append(row)
    assert list(records(read_log(tmp_path / "log").table)) == rows


def test_loop_thread_writes_itself_when_the_flusher_falls_far_behind(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EventLogWriter, "_flush_old_rows", lambda self: None)
    rows = make_rows(300)
    with open_log(tmp_path / "log", max_rows=4) as writer:
        for row in rows:
            writer.append(row)
        assert read_log(tmp_path / "log").table.num_rows == 256
    assert list(records(read_log(tmp_path / "log").table)) == rows


def test_order_holds_when_both_threads_write(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(3000)
    with open_log(tmp_path / "log", max_rows=16, flush_interval_s=0.0) as writer:
        for row in rows:
            writer.append(row)
            if row.seq % 50 == 0:
                writer.flush()
    log = read_log(tmp_path / "log")
    assert list(records(log.table)) == rows
    assert log.complete


def test_refuses_an_existing_log(tmp_path: Path, make_rows: RowMaker) -> None:
    path = tmp_path / "log"
    write_log(path, make_rows(3), METADATA)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="already holds an event log"):
        open_log(path)
    with pytest.raises(FileExistsError):
        write_log(path, [], METADATA)
    assert path.read_bytes() == before


def test_a_missing_directory_is_an_event_log_error(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match="cannot create"):
        open_log(tmp_path / "none" / "log")


def test_disk_full_in_the_flusher_reaches_the_loop_thread(
    tmp_path: Path, make_rows: RowMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    writer = open_log(tmp_path / "log", max_rows=2)
    assert writes.done.acquire(timeout=30)
    writes.fail_from = 1
    rows = make_rows(9)
    writer.append(rows[0])
    writer.append(rows[1])
    assert writes.done.acquire(timeout=30), "the flusher tried"
    with pytest.raises(EventLogError, match="No space left on device") as first:
        writer.flush()
    writes.fail_from = None
    for call in (lambda: writer.append(rows[2]), writer.flush, writer.sync, writer.close):
        with pytest.raises(EventLogError, match="No space left") as later:
            call()
        assert later.value.__cause__ is first.value.__cause__, "the first error is the one that is kept"
    writer.close()
    assert read_log(tmp_path / "log").table.num_rows == 0
    assert len(writes.sizes) == 1, "nothing is written after a failure"


def test_disk_full_at_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Writes(monkeypatch).fail_from = 0
    with pytest.raises(EventLogError, match="No space left"):
        open_log(tmp_path / "log")


def test_a_row_of_a_wrong_type_is_an_error_not_a_dead_flusher(tmp_path: Path) -> None:
    writer = open_log(tmp_path / "log")
    writer.append(Record(0, 1, RecordKind.METRIC, batch_id="seven"))  # type: ignore[arg-type]
    with pytest.raises(EventLogError, match="seven"):
        writer.flush()
    with pytest.raises(EventLogError, match="seven"):
        writer.close()


def test_a_killed_process_leaves_what_it_flushed(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from fsm_trainer.core.events import Record, RecordKind\n"
        "from fsm_trainer.eventlog.writer import EventLogWriter\n"
        "writer = EventLogWriter(sys.argv[1], metadata={}, flush_interval_s=3600)\n"
        "for seq in range(7):\n"
        "    writer.append(Record(seq, seq, RecordKind.METRIC))\n"
        "    if seq == 4:\n"
        "        writer.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "log")], check=False)
    assert done.returncode == -signal.SIGKILL
    log = read_log(tmp_path / "log")
    assert (log.table.num_rows, log.state, log.problem) == (5, "crashed", None)


def test_nothing_after_close_and_no_thread_left(tmp_path: Path, make_rows: RowMaker) -> None:
    before = threading.active_count()
    writer = open_log(tmp_path / "log")
    assert threading.active_count() == before + 1
    writer.close()
    writer.close()
    assert threading.active_count() == before
    for call in (lambda: writer.append(make_rows(2)[0]), writer.flush, writer.sync):
        with pytest.raises(EventLogError, match="is closed"):
            call()


def test_a_log_deleted_meanwhile_is_told_at_the_end(tmp_path: Path) -> None:
    log = open_log(tmp_path / "events.arrows")
    (tmp_path / "events.arrows").unlink()
    with pytest.raises(EventLogError, match=r"events\.arrows: .*it was deleted while the run wrote it"):
        log.close()
