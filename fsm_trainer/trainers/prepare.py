"""Everything before a run: fill in the configuration, check it, open its inputs. Starts nothing, writes nothing.

A preset's files are made in a scratch folder and checked there, so that a refused or dry run leaves nothing behind;
`Prepared.place_files` moves them into the run's folder.
"""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fsm_trainer.config import ConfigError, TrainConfig
from fsm_trainer.config.check_rewards import GivenRewards
from fsm_trainer.config.checkpoint import SOURCE_STATE
from fsm_trainer.config.errors import flag, one_line
from fsm_trainer.config.preflight import Inputs, check_inputs, check_machine, check_model, count_cuda_devices
from fsm_trainer.config.resolve import INPUT_PATHS, locate, missing_files, resolve
from fsm_trainer.config.resume import ResumePoint, find_resume_point
from fsm_trainer.core.config import SchedulerConfig
from fsm_trainer.data.datasets import Rows
from fsm_trainer.data.reasoning_gym import default_reward_for
from fsm_trainer.presets import prepare_preset
from fsm_trainer.trainers.engines import lora_settings, transport_of
from fsm_trainer.trainers.metric_names import METRICS, find


@dataclass
class Prepared:
    """A run that has passed every check and has not started."""

    config: TrainConfig
    """Resolved; inputs by absolute paths, preset files by those they will have in the run's folder."""
    inputs: Inputs | None
    """None when the batches come from a queue."""
    scratch: tempfile.TemporaryDirectory[str] | None = field(default=None, repr=False)
    resume: ResumePoint | None = None
    """What the run goes on from; the prompts of `inputs` stand there already."""

    def scheduler_config(self) -> SchedulerConfig:
        """What the scheduler needs: where it begins, and how many batches there are at most."""
        prompts = None if self.inputs is None else self.inputs.prompts
        if self.resume is None:
            return self.config.to_scheduler_config(None if prompts is None else prompts.total_batches)
        start = self.resume.checkpoint
        limit = None if prompts is None else start.train_version + prompts.batches_left
        config = self.config.to_scheduler_config(limit)
        return replace(config, first_version=start.train_version, first_batch=start.first_batch)

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
    config, point = _resumed(config)
    given = {"reward_fn_path": reward_fn is not None, "dataset_path": dataset is not None}
    provided = frozenset(name for name, there in given.items() if there)
    if point is not None:
        _check_given(point, config, provided)
        _check_there(point, config, [name for name in INPUT_PATHS if name not in provided])
    cuda_devices = count_cuda_devices(config)
    # What the user wrote first, so that a message quotes it; then what was filled in.
    check_machine(config, cuda_devices, provided)
    config = resolve(config, cuda_devices)
    check_machine(config, cuda_devices, provided)
    transport_of(config)  # refuses one that cannot be
    _check_best(config)
    # The files of a resumed run's preset lie in the folder of the run before.
    if config.preset is None or point is not None:
        inputs = check_inputs(config, reward_fn=reward_fn, dataset=dataset)
        _check_adapted_layers(config)
        _go_on(point, config, inputs)
        return Prepared(locate(config), inputs, resume=point)
    scratch = tempfile.TemporaryDirectory(prefix="fsm-train-")
    try:
        made, final = Path(scratch.name) / "preset", Path(str(config.output_dir)).absolute() / "preset"
        trial = prepare_preset(config, made, provided)
        inputs = check_inputs(trial, reward_fn=reward_fn, dataset=dataset)
        _check_adapted_layers(trial)
    except BaseException:
        scratch.cleanup()
        raise
    return Prepared(_relocated(locate(trial), made, final), inputs, scratch)


def prepare_for_queue(config: TrainConfig) -> Prepared:
    """The same for a run whose batches come from producers outside it: there is no dataset and no reward to check."""
    provided = frozenset({"dataset_path", "reward_fn_path"})
    config, point = _resumed(config)
    if point is not None:
        _check_there(point, config, ["ckpt"])
    cuda_devices = count_cuda_devices(config)
    if config.ckpt is None:
        raise ConfigError("--ckpt is missing; give the model to train, a folder or a hub name")
    for name in ("dynamic_sampling", "overlong_buffer_tokens"):
        if getattr(config, name):
            raise ConfigError(
                f"{flag(name)} has no meaning with a queue, whose batches are scored already; leave it out"
            )
    # Whoever generates reads the published weights by itself.
    config = resolve(config.model_copy(update={"rollout_engine": "hf"}), cuda_devices)
    check_machine(config, cuda_devices, provided)
    transport_of(config)
    _check_best(config)
    check_model(config)
    _check_adapted_layers(config)
    _go_on(point, config, None)
    return Prepared(locate(config), None, resume=point)


def _resumed(config: TrainConfig) -> tuple[TrainConfig, ResumePoint | None]:
    """The settings of the run that is resumed, if one is, with those that were given in their place."""
    if config.resume is None:
        return config, None
    point = find_resume_point(config.resume)
    given = {name: getattr(config, name) for name in config.model_fields_set}
    config = TrainConfig.build(point.settings(given))
    point.check_fixed(config)
    return config, point


def _check_best(config: TrainConfig) -> None:
    """ConfigError for a name that no run has among its metrics; whether this one has it, its first step says."""
    if config.save_best is not None and find(config.save_best) is None:
        near = difflib.get_close_matches(config.save_best, [metric.name for metric in METRICS], n=3)
        meant = f"did you mean {' or '.join(near)}?" if near else "docs/metrics.md lists them"
        raise ConfigError(f"--save-best is {config.save_best}, which is not the name of a metric; {meant}")


def _check_adapted_layers(config: TrainConfig) -> None:
    """ConfigError if --lora-target-modules names a layer that the model does not have."""
    if config.lora_target_modules is None:
        return
    # Imports torch.
    from fsm_trainer.engines.hf_lora import check_targets

    lora = lora_settings(config)
    assert lora is not None and config.ckpt is not None, config
    try:
        check_targets(config.ckpt, lora.target_modules)
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def _check_given(point: ResumePoint, config: TrainConfig, provided: frozenset[str]) -> None:
    """ConfigError unless there is a path or an object for what the run before was given as an object."""
    if SOURCE_STATE not in point.checkpoint.files:
        raise ConfigError(f"{point.name} is of a run whose batches came from a queue; give a queue to this one too")
    if default_reward_for(config.dataset_path) is not None:
        provided |= {"reward_fn_path"}
    names = [n for n in ("dataset_path", "reward_fn_path") if getattr(config, n) is None and n not in provided]
    if names:
        flags = " and ".join(map(flag, names))
        raise ConfigError(
            f"{point.name}: the run before was given a Python object instead of {flags}, and no checkpoint keeps one; "
            f"give {flags}, or resume from Python with the object"
        )


def _check_there(point: ResumePoint, config: TrainConfig, names: Sequence[str]) -> None:
    """ConfigError if a file that the run before read, and that is not given anew, is gone."""
    taken = [name for name in names if getattr(config, name) == point.values.get(name)]
    gone = {flag(name): files for name in taken if (files := missing_files(config, name))}
    if gone:
        listed = " and ".join(f"{name} {', '.join(files)}" for name, files in gone.items())
        raise ConfigError(
            f"{point.name}: the run before read {listed}, not there any more; give {' and '.join(gone)} anew"
        )


def _go_on(point: ResumePoint | None, config: TrainConfig, inputs: Inputs | None) -> None:
    """Hold the checkpoint against the run that is to go on from it, and set the prompts to where they stood then."""
    if point is None:
        return
    checkpoint = point.checkpoint
    taken = checkpoint.train_version
    if config.max_steps is not None and taken >= config.max_steps:
        raise ConfigError(
            f"{point.name}: its {taken} optimiser steps are all that --max-steps {config.max_steps} asks for; give more"
        )
    point.check_files()
    _check_engine_state(point, config)
    if inputs is not None:
        _set_prompts(point, inputs)


def _check_engine_state(point: ResumePoint, config: TrainConfig) -> None:
    # Imports torch.
    from fsm_trainer.engines.hf_checkpoint import check_fits

    assert config.ckpt is not None, config
    try:
        check_fits(point.checkpoint.path, config.ckpt)
    except ValueError as error:
        raise ConfigError(f"{point.name}: {one_line(error)}") from error


def _set_prompts(point: ResumePoint, inputs: Inputs) -> None:
    state = (point.checkpoint.path / SOURCE_STATE).read_text(encoding="utf-8")
    try:
        inputs.prompts.load_state_dict(json.loads(state))
    except ValueError as error:
        raise ConfigError(f"{point.name}: {one_line(error)}") from error
    if not inputs.prompts.batches_left:
        raise ConfigError(f"{point.name}: every prompt of every epoch is used up; give more --epochs")


def _relocated(config: TrainConfig, old: Path, new: Path) -> TrainConfig:
    """The configuration with every path below `old` below `new` instead."""
    texts = {name: value for name, value in config if isinstance(value, str)}
    inside = {name: Path(text) for name, text in texts.items() if Path(text).is_relative_to(old)}
    return config.model_copy(update={name: str(new / path.relative_to(old)) for name, path in inside.items()})
