"""Writing a checkpoint so that it is either whole or not there: a temporary sibling, fsync, rename.

Knows nothing of when to save, nor of the optimiser's state.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: str | Path) -> None:
    """Write model and tokenizer in the form that `from_pretrained` loads; on the disk when this returns."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


@contextmanager
def atomic_directory(directory: str | Path) -> Iterator[Path]:
    """Give a temporary sibling to write into, and make it `directory` if nothing was raised.

    A directory that is there already is replaced. Whatever kills the process, `directory` is never half written.
    """
    final = Path(directory).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary, previous = (final.with_name(f".{final.name}.{tag}-{os.getpid()}") for tag in ("new", "old"))
    try:
        temporary.mkdir()
        yield temporary
        for path in (*temporary.rglob("*"), temporary):
            _fsync(path)
        if final.exists():
            final.rename(previous)
        temporary.rename(final)
        _fsync(final.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
