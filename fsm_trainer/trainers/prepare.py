"""Everything before a run: fill in the configuration, check it, open its inputs. Starts nothing, writes nothing.

A preset's files are made in a scratch folder and checked there, so that a refused or dry run leaves nothing behind;
`Prepared.place_files` moves them into the run's folder.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.check_rewards import GivenRewards
from fsm_trainer.config.preflight import Inputs, check_inputs, check_machine, check_model, count_cuda_devices
from fsm_trainer.config.resolve import resolve
from fsm_trainer.data.datasets import Rows
from fsm_trainer.presets import prepare_preset


@dataclass
class Prepared:
    """A run that has passed every check and has not started."""

    config: TrainConfig
    """Resolved; paths of preset files are those they will have in the run's folder."""
    inputs: Inputs | None
    """None when the batches come from a queue."""
    scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)

    def place_files(self) -> None:
        """Put the preset's files, if any, into the run's folder."""
        if self.scratch is not None:
            shutil.copytree(Path(self.scratch.name) / "preset", Path(str(self.config.output_dir)) / "preset")
            self.discard()

    def discard(self) -> None:
        """Forget what was made aside."""
        if self.scratch is not None:
            self.scratch.cleanup()
            self.scratch = None


def prepare(config: TrainConfig, *, reward_fn: GivenRewards | None = None, dataset: Rows | None = None) -> Prepared:
    """Resolve and check a configuration; ConfigError (a ValueError) says what is wrong in one line.

    `reward_fn` and `dataset` stand in for the configuration's paths.
    """
    given = {"reward_fn_path": reward_fn is not None, "dataset_path": dataset is not None}
    provided = frozenset(name for name, there in given.items() if there)
    cuda_devices = count_cuda_devices(config)
    # What the user wrote first, so that a message quotes it; then what was filled in.
    check_machine(config, cuda_devices, provided)
    config = resolve(config, cuda_devices)
    check_machine(config, cuda_devices, provided)
    if config.preset is None:
        return Prepared(config, check_inputs(config, reward_fn=reward_fn, dataset=dataset))
    scratch = tempfile.TemporaryDirectory(prefix="fsm-train-")
    try:
        made, final = Path(scratch.name) / "preset", Path(str(config.output_dir)) / "preset"
        trial = prepare_preset(config, made, provided)
        inputs = check_inputs(trial, reward_fn=reward_fn, dataset=dataset)
    except BaseException:
        scratch.cleanup()
        raise
    return Prepared(_relocated(trial, made, final), inputs, scratch)


def prepare_for_queue(config: TrainConfig) -> Prepared:
    """The same for a run whose batches come from producers outside it: there is no dataset and no reward to check."""
    provided = frozenset({"dataset_path", "reward_fn_path"})
    cuda_devices = count_cuda_devices(config)
    if config.ckpt is None:
        raise ConfigError("--ckpt is missing; give the model to train, a folder or a hub name")
    config = resolve(config, cuda_devices)
    check_machine(config, cuda_devices, provided)
    check_model(config)
    return Prepared(config, None)


def _relocated(config: TrainConfig, old: Path, new: Path) -> TrainConfig:
    """The configuration with every path below `old` below `new` instead."""
    texts = {name: value for name, value in config if isinstance(value, str)}
    inside = {name: Path(text) for name, text in texts.items() if Path(text).is_relative_to(old)}
    return config.model_copy(update={name: str(new / path.relative_to(old)) for name, path in inside.items()})
