"""Datasets that the `datasets` library loads: hub names, and folders that are laid out as on the hub or saved to disk.

Knows nothing of single files, and never waits long for a hub.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

_DEFAULT_SPLIT = "train"
_LONGEST_REASON = 400


def split_hub_name(name: str) -> tuple[str, str | None, str]:
    """Dataset, configuration and split of `NAME[:CONFIG[:SPLIT]]`."""
    parts = name.split(":")
    if len(parts) > 3 or not parts[0]:
        raise ValueError(f"dataset {name!r} is no file and no hub name, expected NAME[:CONFIG[:SPLIT]]")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    return parts[0], config, parts[2] if len(parts) == 3 and parts[2] else _DEFAULT_SPLIT


def load_from_hub(name: str) -> Dataset:
    """The dataset of a hub name, from the hub or from the local cache."""
    dataset, config, split = split_hub_name(name)
    # Never wait long for a hub that does not answer; the local cache is used when it is offline.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    return _load(dataset, config, split, f"{name!r} is no file here and the hub or its cache gave none")


def load_folder(folder: Path, parts: list[str]) -> Dataset:
    """The dataset of a folder; `parts` is what follows it after colons, `[CONFIG[:SPLIT]]` or only a split.

    A folder of `save_to_disk` is read as it is, any other the way the hub's are.
    """
    shown = ":".join([str(folder), *parts])
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return _load_saved(folder, shown, next((part for part in reversed(parts) if part), None))
    # An absolute path, so that it cannot be taken for a hub name.
    _, config, split = split_hub_name(":".join(["folder", *parts]))
    return _load(str(folder.resolve()), config, split, f"{shown} is a folder that gives no dataset")


def _load(path: str, config: str | None, split: str, what: str) -> Dataset:
    from datasets import load_dataset
    from datasets.exceptions import DatasetsError

    try:
        return load_dataset(path, config, split=split)
    except (ConnectionError, OSError, ValueError, DatasetsError) as error:
        raise ValueError(f"dataset {what}: {_reason(error)}") from error


def _load_saved(folder: Path, shown: str, split: str | None) -> Dataset:
    from datasets import Dataset, load_from_disk

    try:
        # In memory, as every other local file: a run must not depend on what becomes of the folder.
        saved: Any = load_from_disk(str(folder), keep_in_memory=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"dataset {shown} was saved by save_to_disk but cannot be read: {_reason(error)}") from error
    if isinstance(saved, Dataset):
        return saved
    splits = list(saved)
    wanted = split or (splits[0] if len(splits) == 1 else _DEFAULT_SPLIT)
    if wanted not in saved:
        raise ValueError(f"dataset {shown} has the splits {', '.join(splits)}; give one as {folder}:SPLIT")
    return saved[wanted]


def _reason(error: Exception) -> str:
    cause = f": {error.__cause__}" if error.__cause__ is not None else ""
    text = " ".join(f"{error}{cause}".split())
    # Some of the library's messages list every file suffix it knows.
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."
