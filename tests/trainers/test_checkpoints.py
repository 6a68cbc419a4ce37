"""A checkpoint is whole or not there, whatever kills the process at whatever moment; old ones go, good ones stay."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fsm_trainer.config.checkpoint import list_checkpoints, read_checkpoint
from fsm_trainer.trainers import checkpoints
from fsm_trainer.trainers.checkpoints import CheckpointStore, remove_checkpoint, write_checkpoint

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"}
"""Audit events of Python that are, or precede, a change of files."""


def fill(text: str) -> Callable[[Path], None]:
    """A model of two files, one of them in a folder."""

    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "model").write_text(text)
        (folder / "sub" / "shard").write_text(text * 2)

    return write


def save(store: CheckpointStore, step: int, reward: float = 0.0) -> Path:
    path = store.folder / f"step-{step:06d}"
    store.note_step({"reward_mean": reward})
    store.save(path, fill(f"weights of {step}"), train_version=step, first_batch=step)
    return path


def good(folder: Path) -> list[int]:
    """Steps of the checkpoints that a run would go on from; each must be whole."""
    found = list_checkpoints(folder)
    for each in found:
        each.check_files()
        assert (each.path / "model").read_text() == f"weights of {each.train_version}"
    return [each.train_version for each in found]


def in_a_child(work: Callable[[], object]) -> int:
    """Run it in a process of its own; its exit status, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent judges by what lies on the disk
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(count: int) -> None:
    """Let the process be killed just before its `count`th touch of the disk."""
    left = [count]

    def touch() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[object, ...]) -> None:
        if event in TOUCHES:
            touch()

    fsync = os.fsync

    def counted(fd: int) -> None:
        touch()
        fsync(fd)

    os.fsync = counted
    sys.addaudithook(hook)


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """The third save of a store that keeps one: writing it and removing the one before are killed at every touch."""
    killed, seen = 0, set()
    while True:
        folder = tmp_path / str(killed)
        store = CheckpointStore(folder, total_limit=1)
        save(store, 1)
        save(store, 2)
        assert good(folder) == [2]

        def third(store: CheckpointStore = store, touches: int = killed + 1) -> None:
            kill_at(touches)
            save(store, 3)

        status = in_a_child(third)
        left = good(folder)
        seen.add(tuple(left))
        assert left in ([2], [2, 3], [3])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        killed += 1
        save(store, 4)
        assert good(folder) == [4], "what a kill left behind is in nobody's way"
    assert killed > 25
    assert seen == {(2,), (2, 3), (3,)}


def test_a_kill_while_a_save_is_repeated_leaves_none_half_written(tmp_path: Path) -> None:
    killed = 0
    while True:
        folder = tmp_path / str(killed)
        save(CheckpointStore(folder), 1)
        save(CheckpointStore(folder), 2)

        def again(folder: Path = folder, touches: int = killed + 1) -> None:
            kill_at(touches)
            save(CheckpointStore(folder), 2)

        if in_a_child(again) == 0:
            break
        killed += 1
        assert good(folder) in ([1], [1, 2])
    assert killed > 20
    assert good(folder) == [1, 2]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    """A limit of the file size stands for it: the third file does not fit."""
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def too_large() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        save(store, 2)

    assert in_a_child(too_large) == 1
    assert good(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_full_disk_that_safetensors_meets_is_told_as_the_system_s(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        save_file({"w": np.zeros(4)}, folder / "no" / "w")

    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*step-000001"):
        CheckpointStore(tmp_path).save(tmp_path / "step-000001", write, train_version=1, first_batch=1)


@pytest.mark.parametrize("when", ["fill", "fsync", "rename", "manifest"])
def test_a_failed_save_raises_and_leaves_nothing(when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, total_limit=1)
    save(store, 1)

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device")

    if when == "fsync":
        monkeypatch.setattr(os, "fsync", fails)
    elif when == "rename":
        monkeypatch.setattr(Path, "rename", fails)
    elif when == "manifest":
        monkeypatch.setattr(checkpoints, "write_whole", fails)
    write = fails if when == "fill" else fill("weights of 2")
    with pytest.raises(OSError, match="No space left on device"):
        store.save(tmp_path / "step-000002", write, train_version=2, first_batch=2)
    monkeypatch.undo()
    assert good(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_everything_is_on_the_disk_before_the_rename_and_the_manifest_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(fd: int) -> None:
        steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        fsync(fd)

    def note_rename(self: Path, to: Path) -> Path:
        steps.append(f"{to.name}!")
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    path = tmp_path / "last"
    write_checkpoint(path, fill("x"), train_version=1, first_batch=1)
    at = steps.index("last!")
    partial = f".last.partial-{os.getpid()}"
    assert sorted(steps[:at]) == sorted(["sub", "model", "shard", partial])
    assert steps[at:] == ["last!", tmp_path.name, "manifest.partial", "manifest.json!", "last"]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, total_limit=2, best="reward_mean")
    for step, reward in enumerate([0.1, 0.9, 0.3, 0.4, 0.2], start=1):
        save(store, step, reward)
    assert good(tmp_path) == [2, 4, 5]
    save(store, 6, 0.9)
    assert good(tmp_path) == [5, 6], "of two that are as good the newer one stays"


def test_metrics_are_means_since_the_checkpoint_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for value in (1.0, 2.0, float("inf")):
        store.note_step({"loss": value})
    assert read_checkpoint(save(store, 1, 5.0)).metrics == {"loss": 1.5, "reward_mean": 5.0}
    assert read_checkpoint(save(store, 2, 7.0)).metrics == {"reward_mean": 7.0}


def test_without_a_limit_all_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(1, 5):
        save(store, step)
    assert good(tmp_path) == [1, 2, 3, 4]


def test_what_somebody_spoilt_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = CheckpointStore(tmp_path, total_limit=1)
    spoilt = save(store, 1)
    (spoilt / "manifest.json").write_text("{")
    save(store, 2)
    save(store, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000003"]
    said = capsys.readouterr()
    assert "checkpoint_left_alone" in said.out + said.err


def test_one_that_cannot_be_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = CheckpointStore(tmp_path, total_limit=1)
    save(store, 1)

    def refuses(path: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints.shutil, "rmtree", refuses)
    save(store, 2)
    said = capsys.readouterr()
    assert "checkpoint_not_removed" in said.out + said.err
    assert good(tmp_path) == [2], "its manifest went first"


def test_removing_what_is_not_there_does_nothing(tmp_path: Path) -> None:
    remove_checkpoint(tmp_path / "none")
