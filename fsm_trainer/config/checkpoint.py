"""A checkpoint's manifest: what makes a folder something that a run may go on from.

It lists every file with its size and digest and is written last, so a folder with a right manifest is whole, and one
without is nothing. Knows nothing of models: what is in the files is the train engine's affair.
"""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
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


class DamagedCheckpoint(ValueError):  # noqa: N818 - what was found
    """A folder with a manifest whose files are not those that were written, or whose manifest is not."""

    def __init__(self, path: Path, what: str) -> None:
        """Say what is wrong with the checkpoint at `path`."""
        super().__init__(f"checkpoint {path} is damaged: {what}")
        self.path = path


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
        """DamagedCheckpoint unless every file is there as it was written."""
        for name in sorted(self.files):
            self.check_file(name)

    def check_file(self, name: str) -> None:
        """The same for one file."""
        path, mark = self.path / name, self.files.get(name)
        if mark is None or not path.is_file():
            raise DamagedCheckpoint(self.path, f"{name} is missing")
        size = path.stat().st_size
        if size != mark.size:
            raise DamagedCheckpoint(self.path, f"{name} has {size} bytes, {mark.size} were written")
        if FileMark.of(path) != mark:
            raise DamagedCheckpoint(self.path, f"{name} is not what was written")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a folder's manifest. ValueError for a folder without a right one."""
    try:
        values = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{path} has no {MANIFEST}: it is no checkpoint, or its save was cut short") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(path, f"its {MANIFEST} cannot be read") from error
    if not isinstance(values, dict) or not isinstance(values.get("format"), int):
        raise DamagedCheckpoint(path, f"its {MANIFEST} is none of this program")
    if values["format"] > FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {values['format']}, which a newer fsm_trainer wrote; this one reads {FORMAT}"
        )
    given = values.pop("digest", None)
    if given != _digest(values):
        raise DamagedCheckpoint(path, f"its {MANIFEST} is not what was written")
    files = {name: FileMark(**mark) for name, mark in values["files"].items()}
    return Checkpoint(path, values["train_version"], values["first_batch"], files, values["metrics"])


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """The right checkpoints in a folder by `train_version`; what has no manifest, or a wrong one, is left out."""
    found = []
    for manifest in folder.glob(f"*/{MANIFEST}"):
        with suppress(ValueError):
            found.append(read_checkpoint(manifest.parent))
    return sorted(found, key=lambda checkpoint: checkpoint.train_version)


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint with the highest `train_version`, if there is one. ValueError if one of a later name is wrong."""
    right = list_checkpoints(folder)
    known = {each.path for each in right}
    newest = right[-1].train_version if right else -1
    for path in sorted((path.parent for path in folder.glob(f"*/{MANIFEST}")), key=_step, reverse=True):
        if path not in known and (_step(path) > newest or not right):
            return read_checkpoint(path)
    return right[-1] if right else None


def checkpoint_before(path: Path) -> Checkpoint | None:
    """The newest right checkpoint beside this one of a lower step than its name has."""
    found = [each for each in list_checkpoints(path.parent) if each.train_version < _step(path)]
    return found[-1] if found else None


def _step(path: Path) -> int:
    """The step in a checkpoint's name; -1 where there is none."""
    found = re.fullmatch(r"step-(\d+)", path.name)
    return int(found.group(1)) if found else -1


def _digest(values: dict[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
