"""Writes a run's checkpoints so that each is whole or not there, and removes the ones no longer wanted.

A save writes into a folder aside, brings every file to the storage, renames the folder, and writes the manifest last.
Whatever kills the process meanwhile, what lies there without a manifest is never taken for a checkpoint; a removal
takes the manifest away first.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from fsm_trainer.config.checkpoint import MANIFEST, Checkpoint, FileMark, read_checkpoint

_log = structlog.get_logger("fsm_train")


@dataclass
class CheckpointStore:
    """The checkpoints of one run, in one folder; used by the trainer's thread."""

    folder: Path
    total_limit: int | None = None
    """How many of the newest are kept; None for all."""
    best: str | None = None
    """The metric whose highest mean since the checkpoint before makes one kept besides the newest."""
    _sums: dict[str, tuple[float, int]] = field(default_factory=dict)

    def note_step(self, numbers: Mapping[str, float]) -> None:
        """Take in one optimiser step's metrics. ValueError if the metric to choose by is not among them."""
        if self.best is not None and self.best not in numbers:
            raise ValueError(f"--save-best is {self.best}, expected one of {', '.join(sorted(numbers))}")
        for name, value in numbers.items():
            if math.isfinite(value):
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)

    def save(self, path: Path, fill: Callable[[Path], None], *, train_version: int, first_batch: int) -> None:
        """Make the checkpoint `path` of what `fill` writes into the folder it is given; then remove old ones.

        Whatever is raised (a full disk, say), nothing is left of it and the checkpoints before are as they were.
        """
        metrics = {name: total / count for name, (total, count) in sorted(self._sums.items())}
        write_checkpoint(path, fill, train_version=train_version, first_batch=first_batch, metrics=metrics)
        self._sums.clear()
        self.prune()

    def prune(self) -> None:
        """Remove all but the newest, and the best."""
        if self.total_limit is None:
            return
        found = self._readable()
        kept = {each.path for each in found[-self.total_limit :]}
        if self.best is not None:
            measured = [(each.metrics.get(self.best, -math.inf), each.train_version, each.path) for each in found]
            kept.add(max(measured)[2])
        for each in found:
            if each.path not in kept:
                remove_checkpoint(each.path)

    def _readable(self) -> list[Checkpoint]:
        """Somebody may have spoilt one of them since; that is no reason to fail the run, nor to remove it."""
        found = []
        for manifest in self.folder.glob(f"*/{MANIFEST}"):
            try:
                found.append(read_checkpoint(manifest.parent))
            except ValueError as error:
                _log.warning("checkpoint_left_alone", message=str(error))
        return sorted(found, key=lambda checkpoint: checkpoint.train_version)


def write_checkpoint(
    path: Path,
    fill: Callable[[Path], None],
    *,
    train_version: int,
    first_batch: int,
    metrics: dict[str, float] | None = None,
) -> None:
    """Write one checkpoint; what was at `path` is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    remove_checkpoint(path)
    try:
        partial.mkdir()
        with _system_errors_named(partial):
            fill(partial)
        for each in (*partial.rglob("*"), partial):
            _to_storage(each)
        files = {each.relative_to(partial).as_posix(): each for each in sorted(partial.rglob("*")) if each.is_file()}
        marks = {name: FileMark.of(each) for name, each in files.items()}
        partial.rename(path)
        _to_storage(path.parent)
        checkpoint = Checkpoint(path, train_version, first_batch, marks, metrics or {})
        write_whole(path / MANIFEST, checkpoint.to_json())
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        remove_checkpoint(path)
        raise


@contextmanager
def _system_errors_named(path: Path) -> Iterator[None]:
    """What the system refuses is an OSError, though libraries written in Rust tell it by an error of their own."""
    try:
        yield
    except Exception as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None or isinstance(error, OSError):
            raise
        number = int(found.group(1))
        raise OSError(number, os.strerror(number), str(path)) from error


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, the manifest first, so that half of one is none. One that resists is only reported."""
    try:
        if (path / MANIFEST).exists():
            (path / MANIFEST).unlink()
            _to_storage(path)
        if path.exists():
            shutil.rmtree(path)
    except OSError as error:
        _log.warning("checkpoint_not_removed", path=str(path), message=str(error))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all, and on the storage."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    _to_storage(path.parent)


def _to_storage(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
