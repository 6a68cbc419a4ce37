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


def prepare_preset(config: TrainConfig, folder: Path) -> TrainConfig:
    """Write what the preset of `config` needs into `folder`; paths the user gave are kept."""
    if config.preset is None:
        return config
    made = _PRESETS[config.preset].write_files(folder, seed=config.seed, keep=_given(config))
    return config.model_copy(update={name: path for name, path in made.items() if getattr(config, name) is None})


def _given(config: TrainConfig) -> frozenset[str]:
    names = ("ckpt", "dataset_path", "reward_fn_path")
    return frozenset(name for name in names if getattr(config, name) is not None)
