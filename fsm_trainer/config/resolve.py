"""Fill in what the machine decides: devices, engine sizes, threads and folders. Checks nothing, starts nothing."""

from __future__ import annotations

import os
from pathlib import Path

from fsm_trainer.config.train_config import TrainConfig

_PATHS = ("ckpt", "dataset_path", "dataset_loader_fn", "reward_fn_path", "output_dir", "save_path")

MAX_LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest mean gap that each type's rounding explains, with room to spare; docs/mismatch.md says from what."""


def resolve(config: TrainConfig, cuda_devices: int) -> TrainConfig:
    """The configuration with every default that depends on this machine or on another setting filled in."""
    config = config.model_copy(update=_expanded(config))
    train = config.train_devices or ("cuda:0" if cuda_devices else "cpu")
    output = config.output_dir or next_free_folder(Path("runs"), config.preset or config.algo)
    found: dict[str, object] = {
        "train_devices": train,
        "output_dir": output,
        "save_path": config.save_path or str(Path(output) / "checkpoints"),
        "rollout_tp_size": config.rollout_tp_size or config.tp_size,
        "max_logprob_gap": MAX_LOGPROB_GAP[config.dtype] if config.max_logprob_gap is None else config.max_logprob_gap,
    }
    filled = config.model_copy(update=found)
    groups = filled.rollout_groups
    more: dict[str, object] = {
        "rollout_devices": ",".join(device for group in groups for device in group),
        "threads": config.threads or threads_per_process(len(groups)),
    }
    if config.is_async:
        more["async_rollout_workers"] = config.workers
    return filled.model_copy(update=more)


def _expanded(config: TrainConfig) -> dict[str, object]:
    """Paths that begin with ~, which the shell leaves alone in `--flag=~/x` and in files."""
    values = {name: getattr(config, name) for name in _PATHS}
    return {name: os.path.expanduser(value) for name, value in values.items() if value and value.startswith("~")}


def threads_per_process(engines: int) -> int:
    """The cores this process may use, shared out among the trainer and the rollout engines."""
    return max(1, len(os.sched_getaffinity(0)) // (1 + engines))


def next_free_folder(parent: Path, stem: str) -> str:
    """The first of STEM-0001, STEM-0002, ... after the highest there is."""
    numbers = [path.name.removeprefix(f"{stem}-") for path in parent.glob(f"{stem}-*")]
    highest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return str(parent / f"{stem}-{highest + 1:04d}")
