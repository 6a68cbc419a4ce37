"""Everything that can be found wrong before a run starts, each as one line that says what to do (ConfigError).

`check_machine` needs no input files; `check_inputs` opens model, dataset and reward, and returns what it opened.
Nothing here starts an engine or writes a file.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_trainer.config import hub
from fsm_trainer.config.check_data import check_dataset_path, data_warnings, open_prompts
from fsm_trainer.config.check_rewards import GivenRewards, Rewards, open_rewards
from fsm_trainer.config.check_step import check_adapters, check_end_token, check_step_needs
from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.engine_settings import check_engines, engine_warnings
from fsm_trainer.config.errors import ConfigError, flag, one_line, shown
from fsm_trainer.config.groups import tracker_names
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.data.builtin_rewards import PREFIX as BUILTIN
from fsm_trainer.data.datasets import DATASET_FORMS, LOADER_FUNCTION, Rows
from fsm_trainer.data.prompts import PromptSource
from fsm_trainer.data.reasoning_gym import default_reward_for, is_reasoning_gym
from fsm_trainer.data.reward_specs import split_specs
from fsm_trainer.data.rewards import REWARD_FUNCTION
from fsm_trainer.data.tokenizer import load_tokenizer
from fsm_trainer.data.user_code import load_function, split_spec
from fsm_trainer.engines.vllm_fields import check_known_args, engine_fields
from fsm_trainer.engines.vllm_versions import check_vllm

_REQUIRED = {
    "ckpt": "the model to train, a folder or a hub name",
    "dataset_path": f"the prompts: {DATASET_FORMS}",
    "reward_fn_path": "a Python file that defines reward_fn(record)",
}
_PATHS = ("ckpt", "dataset_path", "dataset_loader_fn", "output_dir", "save_path")


@dataclass(frozen=True)
class Inputs:
    """What the checks opened, for the plan."""

    prompts: PromptSource
    rewards: Rewards
    tokenizer: Any
    dataset_rows: int
    context: int | None
    """Positions the model takes, if its configuration says."""


def count_cuda_devices(config: TrainConfig) -> int:
    """CUDA devices of this machine; 0 without looking when the configuration uses none."""
    if config.train_devices == "cpu" and config.rollout_devices in (None, "cpu"):
        return 0
    # torch takes seconds to import.
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_machine(config: TrainConfig, cuda_devices: int, provided: frozenset[str] = frozenset()) -> None:
    """Devices, engines and folders; `provided` names the paths that objects stand in for."""
    if default_reward_for(config.dataset_path) is not None:
        provided |= {"reward_fn_path"}
    for name in _REQUIRED:
        if getattr(config, name) is None and config.preset is None and name not in provided:
            raise ConfigError(f"{flag(name)} is missing; give {_REQUIRED[name]}, or try --preset quickstart")
    for name in ("train_devices",) if config.base_urls else ("train_devices", "rollout_devices"):
        _check_devices(flag(name), getattr(config, name) or "", cuda_devices)
    _check_sizes(config)
    _check_engine(config)
    check_step_needs(config)
    for name in _PATHS:
        if name != "dataset_path" or not is_reasoning_gym(config.dataset_path or ""):
            _check_path_can_be(flag(name), getattr(config, name))
    for spec in split_specs(config.reward_fn_path) if config.reward_fn_path is not None else ():
        if not spec.startswith(BUILTIN):
            _check_path_can_be("--reward-fn-path", str(split_spec(spec, REWARD_FUNCTION)[0]))
    _check_folder("--output-dir", config.output_dir)
    _check_folder("--save-path", config.save_path)
    _check_trackers(config.report_to)


def _check_trackers(report_to: str) -> None:
    for name in tracker_names(report_to):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"--report-to {name} needs the package {name}, which is not installed; "
                f"pip install 'fsm-trainer[{name}]', or leave it out"
            )


def _check_devices(name: str, text: str, cuda_devices: int) -> None:
    for device in parse_devices(name, text):
        if device != "cpu" and int(device.removeprefix("cuda:")) >= cuda_devices:
            if not cuda_devices:
                raise ConfigError(f"{name} is {text}, but this machine has no CUDA device; give {name} cpu")
            raise ConfigError(
                f"{name} {text} names {device}, but this machine has cuda:0 to cuda:{cuda_devices - 1}; "
                f"give one of these"
            )


def _check_sizes(config: TrainConfig) -> None:
    if config.tp_size > 1:
        raise ConfigError(
            f"--tp-size is {config.tp_size}, but the hf train engine of this version trains on one device; "
            f"give --tp-size 1 and one of the --train-devices"
        )
    devices = parse_devices("--train-devices", config.train_devices or "")
    if len(devices) > 1:
        raise ConfigError(
            f"--train-devices {config.train_devices} names {len(devices)} devices, but the hf train engine of this "
            f"version trains on one device; give one"
        )
    if config.rollout_engine == "hf" and (config.rollout_tp_size or 1) > 1:
        raise ConfigError(
            f"--rollout-tp-size is {config.rollout_tp_size}, but the hf rollout engine generates on one device; give "
            f"--rollout-tp-size 1"
        )


def _check_engine(config: TrainConfig) -> None:
    """Whether the engine that was given, or found to be the one for `auto`, can serve this configuration here."""
    try:
        check_engines(config)
        if config.rollout_engine == "vllm" and not config.base_urls:
            check_vllm()
            if config.vllm_arg and (fields := engine_fields()) is not None:
                check_known_args(config.vllm_arg, fields)
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def _check_path_can_be(name: str, text: str | None) -> None:
    """What the system refuses to look at: a name too long, a loop of links, a folder that may not be entered."""
    if text is None:
        return
    try:
        Path(text).expanduser().stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # what is missing is told by the check that needs it
    except (OSError, RuntimeError) as error:
        why = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigError(f"{name} {shown(text)} cannot be used: {why}; give another path") from error


def _check_folder(name: str, text: str | None) -> None:
    if text is None:
        return
    path = Path(text).expanduser()
    if path.is_symlink() and not path.exists():
        raise ConfigError(f"{name} {text} is a link to nothing; give a folder that is new or empty")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{name} {text} is a file; give a folder that is new or empty")
    try:
        used = path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise ConfigError(f"{name} {text} cannot be read: {error.strerror}; give a new folder") from error
    if used:
        raise ConfigError(f"{name} {text} exists and is not empty, and a run is never overwritten; give a new folder")
    parent = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise ConfigError(f"{name} {text} cannot be made: {parent} is a file; give another folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{name} {text} cannot be written: no permission for {parent}; give another folder")


def check_inputs(config: TrainConfig, *, reward_fn: GivenRewards | None = None, dataset: Rows | None = None) -> Inputs:
    """Model, dataset, loader and reward; `config` has the path of whatever is not given as an object."""
    assert config.ckpt is not None, config
    # Paths first: a wrong one is found at once, whatever the others cost to open.
    _check_paths(config, config.ckpt, config.dataset_path if dataset is None else None)
    try:
        rewards = open_rewards(config, reward_fn)
        context, tokenizer = _check_ckpt(config, config.ckpt)
        dataset, prompts = open_prompts(config, tokenizer, dataset)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(one_line(error)) from error
    return Inputs(prompts, rewards, tokenizer, dataset_rows=len(dataset), context=context)


def check_model(config: TrainConfig) -> None:
    """Only the model, for a run whose batches come from elsewhere."""
    assert config.ckpt is not None, config
    _check_paths(config, config.ckpt, None)
    _check_ckpt(config, config.ckpt)


def _check_ckpt(config: TrainConfig, ckpt: str) -> tuple[int | None, Any]:
    """The positions that the model takes, and its tokenizer."""
    model = _model_config(ckpt)
    context, tokenizer = _check_context(config, model), _tokenizer(ckpt)
    check_end_token(ckpt, model, tokenizer)
    check_adapters(config, model)
    return context, tokenizer


def plan_warnings(config: TrainConfig, inputs: Inputs) -> list[str]:
    """What will run but waste or bias something, in words."""
    found = config.to_scheduler_config(inputs.prompts.total_batches).warnings()
    found += data_warnings(config, inputs.prompts, inputs.tokenizer)
    found += engine_warnings(config)
    if config.top_p < 1 or config.top_k > 0:
        found.append(
            "top-p or top-k filter the sampling: recorded are the logprobs of the whole policy, so that the ratio of a "
            "fresh batch is 1, but tokens outside the filter are never tried; leave them out unless that is wanted"
        )
    return found


def _check_paths(config: TrainConfig, ckpt: str, dataset_path: str | None) -> None:
    uses_hub = False
    if not Path(ckpt).expanduser().is_dir():
        if not hub.is_hub_name(ckpt):
            raise ConfigError(f"--ckpt {ckpt} does not exist; give a model folder or a hub name")
        uses_hub = True
    if dataset_path is not None:
        uses_hub = check_dataset_path(dataset_path, has_loader=config.dataset_loader_fn is not None) or uses_hub
    if config.dataset_loader_fn is not None:
        try:
            load_function(config.dataset_loader_fn, LOADER_FUNCTION, "dataset loader")
        except ValueError as error:
            raise ConfigError(one_line(error)) from error
    if uses_hub:
        hub.settle()


def _model_config(ckpt: str) -> dict[str, Any]:
    """The model's config.json."""
    folder = Path(ckpt).expanduser()
    if folder.is_dir():
        file: str | None = str(folder / "config.json")
        if not (folder / "config.json").is_file():
            raise ConfigError(f"--ckpt {ckpt} has no config.json; give a folder that from_pretrained loads")
    else:
        file = hub.find_file(ckpt, "config.json")
    if file is None:
        why = "the hub is offline or cannot be reached" if hub.is_offline() else "the hub does not give it"
        raise ConfigError(
            f"--ckpt {ckpt} is no folder here, is not in the local hub cache, and {why}; give a model folder, or fetch "
            f"it once where there is a network"
        )
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--ckpt {ckpt}: its config.json cannot be read: {one_line(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--ckpt {ckpt}: its config.json holds a {type(found).__name__}, expected an object")
    return found


def _check_context(config: TrainConfig, model: dict[str, Any]) -> int | None:
    text_part = model.get("text_config")
    text_part = text_part if isinstance(text_part, dict) else {}
    keys = ("max_position_embeddings", "n_positions")
    limits = [part[key] for part in (model, text_part) for key in keys if isinstance(part.get(key), int)]
    if not limits:
        return None
    needed = config.max_prompt_tokens + config.max_new_tokens
    if needed > limits[0]:
        raise ConfigError(
            f"--max-prompt-tokens {config.max_prompt_tokens} and --max-new-tokens {config.max_new_tokens} make "
            f"{needed}, but the model takes {limits[0]} positions; lower one of them"
        )
    return int(limits[0])


def _tokenizer(ckpt: str) -> Any:
    folder = Path(ckpt).expanduser()
    # Without any file transformers builds an empty tokenizer and says nothing.
    patterns = ("tokenizer*", "vocab*", "*.model", "tekken.json")
    if folder.is_dir() and not any(found for pattern in patterns for found in folder.glob(pattern)):
        raise ConfigError(f"--ckpt {ckpt} has no tokenizer files; save the model's tokenizer into the same folder")
    try:
        return load_tokenizer(ckpt)
    except Exception as error:  # what a broken file makes of transformers' many readers
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ConfigError(f"--ckpt {ckpt} has no tokenizer that loads: {shown(reason, 300)}") from error
