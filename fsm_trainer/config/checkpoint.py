"""A checkpoint's manifest: what makes a folder something that a run may go on from.

It lists every file with its size and digest and is written last, so a folder with a right manifest is whole, and one
without is nothing. Knows nothing of models: what is in the files is the train engine's affair.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
RUN_CONFIG = "run_config.json"
"""The run's settings, as in its `config.json`."""
SOURCE_STATE = "prompt_source.json"
"""`PromptSource.state_dict` at the moment of the save; not there when the prompts came from a queue."""
FORMAT = 1
"""Raised when a checkpoint written before could not be read any more."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class FileMark:
    """By which a file is known again."""

    size: int
    """Bytes."""
    blake2b: str
    """Digest of 16 bytes, in hexadecimal."""

    @classmethod
    def of(cls, path: Path) -> FileMark:
        """Read a file and mark it."""
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return cls(path.stat().st_size, digest.hexdigest())


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says."""

    path: Path
    train_version: int
    """Optimiser steps taken."""
    first_batch: int
    """Id of the first batch of a run that goes on from here: one above the highest that was consumed."""
    files: dict[str, FileMark]
    """By their paths below the folder."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Mean of each metric over the steps since the checkpoint before."""

    def to_json(self) -> str:
        """The manifest's text."""
        values = {"format": FORMAT, **{k: v for k, v in asdict(self).items() if k != "path"}}
        return json.dumps({**values, "digest": _digest(values)}, indent=2) + "\n"

    def check_files(self) -> None:
        """ValueError unless every file is there as it was written."""
        for name in sorted(self.files):
            self.check_file(name)

    def check_file(self, name: str) -> None:
        """The same for one file."""
        path, mark = self.path / name, self.files.get(name)
        if mark is None or not path.is_file():
            raise ValueError(f"checkpoint {self.path} is damaged: {name} is missing")
        size = path.stat().st_size
        if size != mark.size:
            raise ValueError(f"checkpoint {self.path} is damaged: {name} has {size} bytes, {mark.size} were written")
        if FileMark.of(path) != mark:
            raise ValueError(f"checkpoint {self.path} is damaged: {name} is not what was written")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder's manifest. ValueError for a folder without a right one."""
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} has no {MANIFEST}: it is no checkpoint, or its save was cut short") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"checkpoint {path} is damaged: its {MANIFEST} cannot be read") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise ValueError(f"checkpoint {path} is damaged: its {MANIFEST} is none of this program")
    if values["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {values['format']}, which a newer fsm_trainer wrote; this one reads {FORMAT}"
        )
    given = values.pop("digest", None)
    if given != _digest(values):
        raise ValueError(f"checkpoint {path} is damaged: its {MANIFEST} is not what was written")
    files = {name: FileMark(**mark) for name, mark in values["files"].items()}
    return Checkpoint(path, values["train_version"], values["first_batch"], files, values["metrics"])


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoints in a folder by `train_version`; folders without a manifest are none. ValueError for a bad one."""
    found = [read_checkpoint(path.parent) for path in folder.glob(f"*/{MANIFEST}")]
    return sorted(found, key=lambda checkpoint: checkpoint.train_version)


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
