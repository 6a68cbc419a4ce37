"""`--resume`: which checkpoint a run goes on from, and its settings: those of the run before, where not given anew.

Reads manifests and configurations; knows nothing of models. What the settings mean for the run itself is the
trainers' affair.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_trainer.config.checkpoint import (
    MANIFEST,
    RUN_CONFIG,
    Checkpoint,
    DamagedCheckpoint,
    checkpoint_before,
    newest_checkpoint,
    read_checkpoint,
)
from fsm_trainer.config.errors import ConfigError, flag, one_line, shown
from fsm_trainer.config.train_config import TrainConfig, given_values

LATEST = "latest"
RUNS = Path("runs")
FIXED = (
    *("algo", "preset", "seed", "shuffle", "drop_last", "batch_size", "dynamic_sampling", "oversample_prompts"),
    *("optimizer", "lora_rank", "lora_alpha", "lora_target_modules"),
)
"""Settings that a resumed run cannot change: what was learnt, or which prompts were served, hangs on them."""
_ANEW = frozenset({"output_dir", "save_path", "resume"})
"""Settings that a run never takes over: they name its own folders."""


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from, and the settings of the run that made it."""

    checkpoint: Checkpoint
    values: dict[str, Any]
    """Those that are not at their defaults, without `_ANEW`."""

    @property
    def name(self) -> str:
        """The checkpoint, for messages."""
        return f"--resume {self.checkpoint.path}"

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The new run's settings: `given` wins over the run before, and another engine over the settings of its own."""
        values = {name: value for name, value in self.values.items() if name not in _left_behind(given)}
        return {**values, **given, "resume": str(self.checkpoint.path)}

    def check_files(self) -> None:
        """Read every file of the checkpoint; ConfigError unless all are as they were written."""
        try:
            self.checkpoint.check_files()
        except ValueError as error:
            raise ConfigError(f"--resume: {_told(error)}") from error

    def check_fixed(self, config: TrainConfig) -> None:
        """ConfigError if a setting is changed that cannot be."""
        before = TrainConfig.build(self.values)
        for name in FIXED:
            if getattr(config, name) != getattr(before, name):
                raise ConfigError(
                    f"{flag(name)} is {_value(config, name)}, but {_value(before, name)} in the run of {self.name}, "
                    f"and a resumed run cannot change it; leave it out, or start a "
                    f"new run"
                )


def find_resume_point(text: str) -> ResumePoint:
    """The newest checkpoint of a run's folder, a checkpoint itself, or the `latest` of all runs below `runs/`.

    ConfigError if there is none, or if its manifest is damaged or of a newer version.
    """
    try:
        checkpoint = _latest() if text == LATEST else _of_path(Path(text).expanduser().absolute())
        checkpoint.check_file(RUN_CONFIG)
        return ResumePoint(checkpoint, _values(checkpoint.path / RUN_CONFIG))
    except ValueError as error:
        raise ConfigError(f"--resume {shown(text)}: {_told(error)}") from error
    except OSError as error:
        raise ConfigError(f"--resume {shown(text)} cannot be read: {error.strerror}") from error


def _left_behind(given: Mapping[str, Any]) -> frozenset[str]:
    """Settings of the run before that mean nothing to the engines or the sync given now; none could leave them out."""
    of_sync = {"async_inflight_cache"} if given.get("async_sync_mode") == "drain" else set()
    return frozenset(of_sync | _of_other_engines(given))


def _of_other_engines(given: Mapping[str, Any]) -> set[str]:
    if given.get("rollout_engine") == "hf":
        return {"rollout_base_url", "rollout_host", "vllm_arg", "rollout_gpu_memory_utilization"}
    if given.get("rollout_host", "server") != "server":
        return {"rollout_base_url"}
    return {"vllm_arg", "rollout_host"} if "rollout_base_url" in given else set()


def _told(error: ValueError) -> str:
    """The message; of a damaged checkpoint also which one is whole."""
    before = checkpoint_before(error.path) if isinstance(error, DamagedCheckpoint) else None
    hint = f"; give {before.path} to go on from the one before" if before else ""
    return f"{one_line(error)}{hint}"


def _value(config: TrainConfig, name: str) -> str:
    value = getattr(config, name)
    return "not set" if value is None else shown(value)


def _of_path(path: Path) -> Checkpoint:
    if (path / MANIFEST).exists():
        return read_checkpoint(path)
    if path.is_file():
        raise ValueError("it is a file; give a run's folder, one of its checkpoints, or latest")
    if not path.is_dir():
        raise ValueError("there is no such folder; give a run's folder, one of its checkpoints, or latest")
    if not (path / "config.json").is_file():
        raise ValueError("it holds no run (no config.json); give a run's folder, one of its checkpoints, or latest")
    found = _newest_of(path)
    if found is None:
        if (path / RUN_CONFIG).exists():
            raise ValueError(f"it has no {MANIFEST}: its save was cut short; give the run's folder for an older one")
        raise ValueError("the run has no checkpoint yet; start it anew")
    return found


def _newest_of(run: Path) -> Checkpoint | None:
    """Of a run that was moved, that inside it; else of those wherever `--save-path` put them."""
    inside = newest_checkpoint(run / "checkpoints")
    if inside is not None:
        return inside
    try:
        save_path = json.loads((run / "config.json").read_text(encoding="utf-8")).get("save_path")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{run / 'config.json'} is damaged: {error}") from error
    return newest_checkpoint(Path(save_path)) if isinstance(save_path, str) else None


def _latest() -> Checkpoint:
    """The checkpoint written last by any run; runs without a right one do not count."""
    newest: tuple[int, Checkpoint] | None = None
    for config in RUNS.absolute().glob("*/config.json"):
        try:
            found = _newest_of(config.parent)
        except ValueError:  # a run whose checkpoints are damaged is no candidate
            continue
        if found is not None:
            written = (found.path / MANIFEST).stat().st_mtime_ns
            if newest is None or written > newest[0]:
                newest = (written, found)
    if newest is None:
        raise ValueError(f"no run below {RUNS}/ has a checkpoint; give the folder of a run")
    return newest[1]


def _values(path: Path) -> dict[str, Any]:
    """The settings that a run which goes on takes over."""
    given = given_values(path.read_text(encoding="utf-8"))
    return {name: value for name, value in given.items() if name not in _ANEW}
