"""Recovering keeps every good row, keeps a copy of what it cuts, and may itself be killed at any moment."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fsm_trainer.core.events import Record
from fsm_trainer.eventlog import recover as recover_module
from fsm_trainer.eventlog.compact import compact
from fsm_trainer.eventlog.reader import read_log, records
from fsm_trainer.eventlog.recover import recover
from fsm_trainer.eventlog.writer import EventLogWriter, write_log
from tests.eventlog.written import METADATA, write_segments

RowMaker = Callable[[int], list[Record]]


@pytest.fixture
def torn(tmp_path: Path, make_rows: RowMaker) -> tuple[Path, bytes, list[Record]]:
    """A run directory whose log lost its end, the bytes that it holds, and its good rows."""
    path = tmp_path / "events.arrows"
    write_log(path, make_rows(12), METADATA, max_rows=4)
    data = path.read_bytes()[:-300]
    path.write_bytes(data)
    return tmp_path, data, make_rows(12)[:8]


def files_of(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(run.iterdir())}


def test_a_torn_tail_is_copied_aside_and_cut_off(torn: tuple[Path, bytes, list[Record]]) -> None:
    run, data, good = torn
    done = recover(run)
    assert (done.events, done.complete, done.removed_bytes) == (8, False, done.copies[0].stat().st_size)
    assert [copy.name for copy in done.copies] == ["events.arrows.torn-1"]
    assert "ends inside a message" in (done.problem or "")
    log = read_log(run)
    assert (log.problem, log.state) == (None, "crashed")
    assert list(records(log.table)) == good
    assert (run / "events.arrows").read_bytes() + done.copies[0].read_bytes() == data, "nothing is lost for good"


def test_recovering_again_does_nothing(torn: tuple[Path, bytes, list[Record]]) -> None:
    recover(torn[0])
    before = files_of(torn[0])
    again = recover(torn[0])
    assert (again.events, again.removed_bytes, again.copies, again.problem) == (8, 0, (), None)
    assert files_of(torn[0]) == before


def test_a_whole_log_is_left_alone(tmp_path: Path, make_rows: RowMaker) -> None:
    write_log(tmp_path / "events.arrows", make_rows(5), METADATA)
    before = files_of(tmp_path)
    done = recover(tmp_path)
    assert (done.events, done.complete, done.problem) == (5, True, None)
    assert files_of(tmp_path) == before
    compact(tmp_path)
    assert recover(tmp_path).events == 5


@pytest.mark.parametrize("cut", range(1, 900, 37))
def test_every_cut_is_recovered_to_the_rows_that_were_readable(tmp_path: Path, make_rows: RowMaker, cut: int) -> None:
    path = tmp_path / "events.arrows"
    write_log(path, make_rows(12), METADATA, max_rows=4)
    path.write_bytes(path.read_bytes()[:-cut])
    before = list(records(read_log(path).table))
    recover(path)
    log = read_log(path)
    assert list(records(log.table)) == before
    assert log.problem is None


def test_damage_is_left_alone_unless_forced(tmp_path: Path, make_rows: RowMaker) -> None:
    path = tmp_path / "events.arrows"
    write_log(path, make_rows(12), METADATA, max_rows=4)
    data = bytearray(path.read_bytes())
    data[-4500] ^= 1  # in the second batch: the third is good
    path.write_bytes(data)
    with pytest.raises(ValueError, match="is damaged after row 3, not only cut off") as refused:
        recover(tmp_path)
    assert "--force" in str(refused.value)
    assert files_of(tmp_path) == {"events.arrows": bytes(data)}
    done = recover(tmp_path, force=True)
    assert (done.events, read_log(tmp_path).problem) == (4, None)
    assert path.read_bytes() + done.copies[0].read_bytes() == data


def test_the_last_of_several_files(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(100)
    files = write_segments(tmp_path / "events.arrows", rows)
    files[-1].write_bytes(files[-1].read_bytes()[:-200])
    done = recover(tmp_path)
    assert done.copies[0].name == f"{files[-1].name}.torn-1"
    log = read_log(tmp_path)
    assert (log.problem, log.damaged) == (None, False)
    assert list(records(log.table)) == rows[:90]


def test_a_file_that_was_only_begun_is_set_aside(tmp_path: Path, make_rows: RowMaker) -> None:
    path = tmp_path / "events.arrows"
    write_log(path, make_rows(5)[:4], METADATA)
    (tmp_path / "events-00001.arrows").write_bytes(path.read_bytes()[:99])
    done = recover(tmp_path)
    assert [copy.name for copy in done.copies] == ["events-00001.arrows.torn-1"]
    assert (read_log(tmp_path).problem, done.events, done.removed_bytes) == (None, 4, 99)


def test_what_comes_after_a_missing_file_is_set_aside_only_by_force(tmp_path: Path, make_rows: RowMaker) -> None:
    rows = make_rows(100)
    files = write_segments(tmp_path / "events.arrows", rows)
    files[2].unlink()
    with pytest.raises(ValueError, match="which is missing"):
        recover(tmp_path)
    done = recover(tmp_path, force=True)
    log = read_log(tmp_path)
    assert (log.problem, log.damaged, log.complete) == (None, False, False)
    assert list(records(log.table)) == rows[: done.events]
    assert {copy.name for copy in done.copies} == {f"{path.name}.torn-1" for path in (files[1], *files[3:])}


def test_a_running_run_is_refused(tmp_path: Path, make_rows: RowMaker) -> None:
    with EventLogWriter(tmp_path / "events.arrows", metadata=METADATA) as writer:
        writer.append(make_rows(2)[0])
        for deed in (recover, compact):
            with pytest.raises(ValueError, match="still being written"):
                deed(tmp_path)
    assert recover(tmp_path).events == 1


@pytest.mark.parametrize("name", ["fsync", "rename", "truncate"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failure_on_the_way_loses_nothing(
    torn: tuple[Path, bytes, list[Record]], monkeypatch: pytest.MonkeyPatch, name: str, error: int
) -> None:
    run, data, good = torn

    def fail(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patch:
        if name == "truncate":
            patch.setattr(recover_module, "sync_directory", fail)
        else:
            patch.setattr(recover_module.os if name == "fsync" else Path, name, fail)
        with pytest.raises(ValueError, match=r"cannot recover .*events\.arrows: "):
            recover(run)
    assert (run / "events.arrows").read_bytes() == data
    assert not [path for path in run.iterdir() if path.suffix == ".part"]
    assert list(records(read_log(run).table)) == good
    recover(run)
    assert list(records(read_log(run).table)) == good


def test_a_tail_that_was_copied_but_not_cut_is_kept_twice(torn: tuple[Path, bytes, list[Record]]) -> None:
    """Killed between the two: the first copy is not overwritten."""
    run, data, _ = torn
    recover(run)
    kept = (run / "events.arrows.torn-1").read_bytes()
    (run / "events.arrows").write_bytes(data)
    assert recover(run).copies[0].name == "events.arrows.torn-2"
    assert (run / "events.arrows.torn-1").read_bytes() == kept == (run / "events.arrows.torn-2").read_bytes()


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    for deed in (recover, compact):
        with pytest.raises(ValueError, match=r"holds no events\.arrows"):
            deed(tmp_path)
    (tmp_path / "events.arrows").write_bytes(b"no log at all, but long enough to be one")
    shutil.copy(tmp_path / "events.arrows", tmp_path / "kept")
    for deed in (recover, compact):
        with pytest.raises(ValueError, match="not a readable event log"):
            deed(tmp_path)
    assert (tmp_path / "events.arrows").read_bytes() == (tmp_path / "kept").read_bytes()
