"""The dataset of a run: whatever `--dataset-path` names, through the user's own loader if there is one.

Knows nothing of tokens or batches; the formats are in the modules beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_trainer.data.hub_datasets import load_folder, load_from_hub, split_hub_name
from fsm_trainer.data.readers import SUFFIXES, read_file
from fsm_trainer.data.reasoning_gym import is_reasoning_gym, load_reasoning_gym
from fsm_trainer.data.rows import Rows, check_rows, column
from fsm_trainer.data.user_code import UserCodeError, load_function, split_spec, where

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "DATASET_FORMS",
    "LOADER_FUNCTION",
    "Rows",
    "check_rows",
    "column",
    "default_loader",
    "is_local",
    "load_training_rows",
    "local_path",
    "split_hub_name",
]

LOADER_FUNCTION = "load_training_dataset"
DATASET_FORMS = "a data file, a folder, a hub name or reasoning-gym:TASK"
"""What `--dataset-path` may be, for messages."""


def default_loader(path: str) -> Dataset:
    """The `datasets.Dataset` of a local file or folder, of a hub name, or of reasoning-gym's tasks."""
    if is_reasoning_gym(path):
        return load_reasoning_gym(path)
    if not is_local(path):
        return load_from_hub(path)
    local, parts = local_path(path)
    if not local.exists():
        raise ValueError(f"dataset {path} does not exist; give {DATASET_FORMS}")
    return load_folder(local, parts) if local.is_dir() else read_file(local)


def is_local(path: str) -> bool:
    """Whether a text means a file or folder: it exists, has a dataset's suffix, or is spelled as a path."""
    local, _ = local_path(path)
    return local.exists() or local.suffix.lower() in SUFFIXES or path.startswith((".", "/", "~"))


def local_path(path: str) -> tuple[Path, list[str]]:
    """The file or folder that a text means, and what follows a folder's name after colons."""
    whole = Path(path).expanduser()
    name, *parts = path.split(":")
    folder = Path(name).expanduser()
    if parts and not whole.exists() and folder.is_dir():
        return folder, parts
    return whole, []


def load_training_rows(dataset_path: str, loader: str | None = None, **kwargs: Any) -> Rows:
    """Rows of a run, through the user's loader (`FILE.py[:FUNCTION]`) if there is one. Each row has a `prompt`.

    A loader is called `load_training_dataset(dataset_path, default_loader=..., **kwargs)`.
    """
    if loader is None:
        rows: Any = default_loader(dataset_path)
    else:
        rows = _call_loader(load_function(loader, LOADER_FUNCTION, "dataset loader"), loader, dataset_path, kwargs)
    check_rows(rows, loader or dataset_path)
    return rows  # type: ignore[no-any-return]


def _call_loader(function: Callable[..., Any], loader: str, dataset_path: str, kwargs: dict[str, Any]) -> Any:
    path, name = split_spec(loader, LOADER_FUNCTION)
    refusals: list[ValueError] = []

    def noted_default_loader(inner_path: str) -> Dataset:
        try:
            return default_loader(inner_path)
        except ValueError as error:
            refusals.append(error)
            raise

    try:
        made = function(dataset_path, default_loader=noted_default_loader, **kwargs)
        return list(made) if isinstance(made, Iterator) else made
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: a script's own way out would end the command with that code and without a word.
        # A message of our own default loader says all there is to say; anything else is the user's code.
        if any(error is refusal for refusal in refusals):
            raise
        raise UserCodeError(f"dataset loader {path}:{name} failed: {where(error, path)}") from error
