"""A checkpoint is whole or not there."""

import os
from pathlib import Path

import pytest

from fsm_trainer.engines.hf_checkpoint import atomic_directory


def tree(path):
    return {p.relative_to(path).as_posix(): p.read_text() for p in Path(path).rglob("*") if p.is_file()}


def test_it_appears_at_the_end_only(tmp_path):
    final = tmp_path / "deep" / "step-1"
    with atomic_directory(final) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a.txt").write_text("a")
        assert temporary.parent == final.parent
        assert not final.exists()
    assert tree(final) == {"sub/a.txt": "a"}
    assert os.listdir(final.parent) == ["step-1"]


def test_an_error_leaves_what_was_there(tmp_path):
    final = tmp_path / "last"
    with atomic_directory(final) as temporary:
        (temporary / "a.txt").write_text("old")
    with pytest.raises(OSError, match="disk full"), atomic_directory(final) as temporary:  # noqa: PT012
        (temporary / "a.txt").write_text("half")
        raise OSError("disk full")
    assert tree(final) == {"a.txt": "old"}
    assert os.listdir(tmp_path) == ["last"]


def test_it_replaces_the_one_before(tmp_path):
    for text in ("old", "new"):
        with atomic_directory(tmp_path / "last") as temporary:
            (temporary / f"{text}.txt").write_text(text)
    assert tree(tmp_path / "last") == {"new.txt": "new"}
    assert os.listdir(tmp_path) == ["last"]


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    steps = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: steps.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name) or fsync(fd)
    )
    monkeypatch.setattr(Path, "rename", lambda self, to: steps.append("rename") or rename(self, to))
    with atomic_directory(tmp_path / "last") as temporary:
        (temporary / "a.txt").write_text("a")
    assert steps == ["a.txt", temporary.name, "rename", tmp_path.name]
