"""Files that the subcommands of `fsm-replay` write: whole or not at all, and never over what a run keeps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def output_file(given: str | None, default: Path) -> Path:
    """The file to write to, `default` if none is given; ValueError if it cannot be written, or is a run's own."""
    path = default if given is None else Path(given)
    with writing(path):
        if path.is_dir():
            raise ValueError(f"{str(path)[:200]} is a folder; give a file to write to with -o FILE")
        if path.exists():
            _check_not_kept(path, default.name)
            with path.open("ab"):
                pass
        else:
            path.touch()
            path.unlink()
    return path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path`, with its suffix, which gets that name once it is written; else nothing is left of it.

    ValueError if it cannot be written. What is no ordinary file, as /dev/stdout, is written to as it is.
    """
    if path.exists() and not path.is_file():
        with writing(path):
            yield path
        return
    target = path.resolve()
    partial = target.with_name(f".{target.stem[:40]}.partial-{os.getpid()}{target.suffix}")
    try:
        with writing(path):
            yield partial
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(path: Path, what: str = "file with -o FILE") -> Iterator[None]:
    """Turns the system's refusal to write into a ValueError that names the file, and what other one to give."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or str(error)
        raise ValueError(f"{str(path)[:200]} cannot be written: {problem}; give another {what}") from error


def _check_not_kept(path: Path, name: str) -> None:
    """ValueError if the file lies in a run's folder and is not an earlier `name`: it may be the log or a checkpoint."""
    from fsm_trainer.eventlog.layout import COMPACT_NAMES
    from fsm_trainer.eventlog.schema import LOG_NAME

    logs = (LOG_NAME, *COMPACT_NAMES.values())
    target = path.resolve()
    if target.name != name and any((folder / log).is_file() for folder in target.parents for log in logs):
        raise ValueError(
            f"{str(path)[:200]} exists in a run's folder and is not written over; give another file with -o FILE"
        )
