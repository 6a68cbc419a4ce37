"""A log that grows is read piece by piece, and what comes out is the log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.core.events import Record
from fsm_trainer.eventlog import follow
from fsm_trainer.eventlog.follow import LogFollower
from fsm_trainer.eventlog.frame import read_frame
from fsm_trainer.eventlog.schema import LOG_NAME, log_metadata
from fsm_trainer.eventlog.writer import EventLogWriter, write_log
from tests.eventlog.conftest import sample_records
from tests.eventlog.written import write_segments
from tests.replay.virtual_run import log_of, virtual_run

CONFIG = SchedulerConfig(max_steps=12)
ROWS = virtual_run(CONFIG, metrics=True)
NAMES = ("seq", "t_ns", "kind", "entity", "message")


def new(follower: LogFollower) -> list[tuple[object, ...]]:
    found = []
    for table in follower.new_rows():
        found += [tuple(row[name] for name in NAMES) for row in table.to_pylist()]
    return found


def expected(rows: list[Record]) -> list[tuple[object, ...]]:
    return [tuple(getattr(row, name) for name in NAMES) for row in rows]


def test_a_whole_log_at_once(tmp_path: Path) -> None:
    follower = LogFollower(log_of(tmp_path, ROWS, CONFIG), NAMES)
    assert not follower.complete
    assert new(follower) == expected(ROWS)
    assert (follower.complete, follower.writing, follower.problem) == (True, False, None)
    assert new(follower) == []


@pytest.mark.parametrize("step", [1, 97, 1000, 40_000])
def test_any_growth_gives_each_row_once(tmp_path: Path, step: int) -> None:
    whole = (log_of(tmp_path / "whole", ROWS, CONFIG) / LOG_NAME).read_bytes()
    head = len((log_of(tmp_path / "head", [], CONFIG) / LOG_NAME).read_bytes())
    if step == 1:
        whole = whole[: head + 30_000]
    growing = tmp_path / LOG_NAME
    growing.write_bytes(whole[:head])
    follower = LogFollower(growing, NAMES)
    found: list[tuple[object, ...]] = []
    with growing.open("ab", buffering=0) as file:
        for at in range(head, len(whole), step):
            file.write(whole[at : at + step])
            # Every byte of growth is a moment at which someone may look; each look costs, so not at all of them.
            if step > 1 or at % 61 == 0:
                found += new(follower)
    found += new(follower)
    assert found == expected(ROWS[: len(found)])
    assert len(found) == len(ROWS) or (step == 1 and len(found) >= 64)
    assert follower.problem is None


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(CONFIG, {})) as writer:
        follower = LogFollower(tmp_path, NAMES)
        sizes = []
        before = follow.read_frame
        monkeypatch.setattr(follow, "read_frame", lambda buffer, at: sizes.append(buffer.size) or before(buffer, at))
        for start in range(0, len(ROWS), 50):
            for row in ROWS[start : start + 50]:
                writer.append(row)
            writer.flush()
            assert follower.writing
            sizes.clear()
            assert new(follower) == expected(ROWS[start : start + 50])
            assert max(sizes) < 40_000, "fifty rows, wherever in the log"
    assert not follower.writing
    assert follower.complete


@pytest.mark.parametrize("max_bytes", [20_000, 60_000])
def test_a_log_of_several_files(tmp_path: Path, max_bytes: int) -> None:
    found = []
    with EventLogWriter(tmp_path / LOG_NAME, metadata=log_metadata(CONFIG, {}), segment_bytes=max_bytes) as writer:
        follower = LogFollower(tmp_path, NAMES)
        for start in range(0, len(ROWS), 40):
            for row in ROWS[start : start + 40]:
                writer.append(row)
            writer.flush()
            found += new(follower)
    assert len(list(tmp_path.glob("events*.arrows"))) > 2
    assert found == expected(ROWS)
    assert new(LogFollower(tmp_path, NAMES)) == found


def test_a_message_longer_than_the_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = log_of(tmp_path, ROWS, CONFIG)
    monkeypatch.setattr(follow, "_WINDOW", 1000)
    assert new(LogFollower(run, NAMES)) == expected(ROWS)


def test_a_damaged_log_ends_at_the_damage(tmp_path: Path) -> None:
    run = log_of(tmp_path, ROWS, CONFIG)
    data = bytearray((run / LOG_NAME).read_bytes())
    data[len(data) // 2] ^= 255
    (run / LOG_NAME).write_bytes(data)
    follower = LogFollower(run, NAMES)
    found = new(follower)
    assert 0 < len(found) < len(ROWS)
    assert found == expected(ROWS[: len(found)])
    assert follower.problem is not None
    assert "reading stopped at byte" in follower.problem
    assert new(follower) == []
    assert not follower.complete


def test_what_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not a run directory"):
        LogFollower(tmp_path, NAMES)
    (tmp_path / LOG_NAME).write_bytes(b"nothing of the kind" * 9)
    with pytest.raises(ValueError, match="is not a readable event log"):
        LogFollower(tmp_path, NAMES)


def test_what_does_not_continue_the_log_is_a_problem_and_no_row(tmp_path: Path) -> None:
    files = write_segments(tmp_path / LOG_NAME, sample_records(100))
    kept = [path.read_bytes() for path in files]
    good = LogFollower(tmp_path, ("seq", "kind"))
    assert sum(table.num_rows for table in good.new_rows()) == 100
    assert (good.complete, good.problem) == (True, None)
    for path, data, problem in (
        (files[2], kept[1], "expected file 2"),
        (files[2], None, "No such file"),
        (files[2], kept[2][:500], "not a readable event log"),
    ):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        follower = LogFollower(tmp_path, ("seq", "kind"))
        rows = sum(table.num_rows for table in follower.new_rows())
        assert problem in (follower.problem or "")
        assert 0 < rows < 100
        assert not follower.complete
        path.unlink(missing_ok=True)
        path.write_bytes(kept[files.index(path)])


def test_a_record_batch_that_comes_twice_is_a_problem(tmp_path: Path) -> None:
    rows = sample_records(9)
    write_log(tmp_path / LOG_NAME, rows, {}, max_rows=3)
    data = (tmp_path / LOG_NAME).read_bytes()
    buffer = pa.py_buffer(data)
    head = read_frame(buffer, 0)
    assert head is not None
    first = read_frame(buffer, head.end)
    assert first is not None
    (tmp_path / "twice").write_bytes(data[: first.end] + data[first.start :])
    follower = LogFollower(tmp_path / "twice", ("seq", "kind"))
    assert sum(table.num_rows for table in follower.new_rows()) == 3
    assert "seq is not dense" in (follower.problem or "")
