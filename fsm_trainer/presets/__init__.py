"""Ready-made tasks by name: their settings, and the files they need, made locally inside the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.presets import quickstart

_PRESETS = {"quickstart": quickstart}


def preset_settings(name: str | None) -> dict[str, Any]:
    """Settings a preset starts from; an unknown name has none (the configuration reports it)."""
    module = _PRESETS.get(name) if name is not None else None
    return dict(module.SETTINGS) if module else {}


def preset_config(name: str, **changes: Any) -> TrainConfig:
    """The configuration of a preset with `changes`, for runs started from Python."""
    if name not in _PRESETS:
        raise ValueError(f"preset is {name!r}, expected one of {', '.join(_PRESETS)}")
    return TrainConfig.build({**preset_settings(name), "preset": name, **changes})


def prepare_preset(config: TrainConfig, folder: Path, provided: frozenset[str] = frozenset()) -> TrainConfig:
    """Write what the preset of `config` needs into `folder`, except what the user gave as a path or an object."""
    if config.preset is None:
        return config
    keep = provided | {name for name, value in config if value is not None}
    return config.model_copy(update=_PRESETS[config.preset].write_files(folder, seed=config.seed, keep=keep))
