"""Fill in what the machine decides: devices, engine sizes, threads and folders. Checks nothing, starts nothing."""

from __future__ import annotations

import os
from pathlib import Path

from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.engine_settings import vllm_can_sample
from fsm_trainer.config.train_config import TrainConfig
from fsm_trainer.data.builtin_rewards import PREFIX as BUILTIN
from fsm_trainer.data.datasets import LOADER_FUNCTION, local_path
from fsm_trainer.data.reasoning_gym import is_reasoning_gym
from fsm_trainer.data.reward_specs import split_specs
from fsm_trainer.data.rewards import REWARD_FUNCTION
from fsm_trainer.data.user_code import split_spec
from fsm_trainer.engines.vllm_versions import check_vllm

INPUT_PATHS = ("ckpt", "dataset_path", "dataset_loader_fn", "reward_fn_path")
"""What a run reads: files, folders, or names of something else."""
_PATHS = (*INPUT_PATHS, "output_dir", "save_path")

MAX_LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest mean gap that each type's rounding explains, with room to spare; docs/mismatch.md says from what."""


def resolve(config: TrainConfig, cuda_devices: int) -> TrainConfig:
    """The configuration with every default that depends on this machine or on another setting filled in."""
    config = config.model_copy(update=_expanded(config))
    train = config.train_devices or ("0" if cuda_devices else "cpu")
    output = config.output_dir or next_free_folder(Path("runs"), config.preset or config.algo)
    found: dict[str, object] = {
        "train_devices": ",".join(parse_devices("--train-devices", train)),
        "output_dir": output,
        "save_path": config.save_path or str(Path(output) / "checkpoints"),
        "max_logprob_gap": MAX_LOGPROB_GAP[config.dtype] if config.max_logprob_gap is None else config.max_logprob_gap,
    }
    filled = config.model_copy(update=found)
    more: dict[str, object] = {"threads": config.threads or threads_per_process(len(filled.rollout_groups))}
    if config.is_async:
        more["async_rollout_workers"] = config.workers
    more.update(_servers() if config.base_urls else _own_engines(filled))
    return filled.model_copy(update=more)


def _servers() -> dict[str, object]:
    """Engines that run elsewhere: on which devices is not ours to say."""
    return {"rollout_engine": "vllm", "rollout_host": "server"}


def _own_engines(config: TrainConfig) -> dict[str, object]:
    devices = ",".join(device for group in config.rollout_groups for device in group)
    engine = _engine_for(config, devices) if config.rollout_engine == "auto" else config.rollout_engine
    size = config.rollout_tp_size or config.tp_size
    return {"rollout_engine": engine, "rollout_devices": devices, "rollout_tp_size": size}


def _engine_for(config: TrainConfig, devices: str) -> str:
    """What `auto` means: vllm where it can serve this run on GPUs; the run's plan shows which it is."""
    on_cpu = parse_devices("--rollout-devices", devices) == ("cpu",)
    if on_cpu or config.lora_rank is not None or not vllm_can_sample(config):
        return "hf"
    try:
        check_vllm()
    except ValueError:
        return "hf"
    return "vllm"


def _expanded(config: TrainConfig) -> dict[str, object]:
    """Paths that begin with ~, which the shell leaves alone in `--flag=~/x` and in files."""
    values = {name: getattr(config, name) for name in _PATHS}
    return {name: os.path.expanduser(value) for name, value in values.items() if value and value.startswith("~")}


def locate(config: TrainConfig) -> TrainConfig:
    """The configuration with every input that is a file or folder here by its absolute path; any other text stays.

    So that a run can be resumed from whatever folder.
    """
    found: dict[str, object] = {}
    for name in INPUT_PATHS:
        text = getattr(config, name)
        parts = _parts(name, text)
        if not any(_is_here(path) for _, path in parts):
            continue
        located = ",".join(str(Path(part).expanduser().absolute()) if _is_here(path) else part for part, path in parts)
        # A folder with a comma in its name could make several functions of one.
        if len(_parts(name, located)) == len(parts):
            found[name] = located
    return config.model_copy(update=found)


def missing_files(config: TrainConfig, name: str) -> list[str]:
    """The absolute paths among the files of one of `INPUT_PATHS` at which there is nothing."""
    paths = [path for _, path in _parts(name, getattr(config, name))]
    return [str(path) for path in paths if path is not None and path.is_absolute() and not os.path.exists(path)]


def _is_here(path: Path | None) -> bool:
    # Unlike Path.exists, False of a text that cannot be a path at all.
    return path is not None and os.path.exists(path)


def _parts(name: str, text: str | None) -> list[tuple[str, Path | None]]:
    """What a setting names, each with the file or folder it would be; None for what never is one."""
    if text is None:
        return []
    if name == "reward_fn_path":
        return [(s, None if s.startswith(BUILTIN) else split_spec(s, REWARD_FUNCTION)[0]) for s in split_specs(text)]
    if name == "dataset_loader_fn":
        return [(text, split_spec(text, LOADER_FUNCTION)[0])]
    if name == "dataset_path":
        return [(text, None if is_reasoning_gym(text) else local_path(text)[0])]
    # A model is a folder; a file of a hub name's spelling does not hide that name.
    path = Path(text).expanduser()
    return [(text, None if os.path.isfile(path) else path)]


def threads_per_process(engines: int) -> int:
    """The cores this process may use, shared out among the trainer and the rollout engines."""
    return max(1, len(os.sched_getaffinity(0)) // (1 + engines))


def next_free_folder(parent: Path, stem: str) -> str:
    """The first of STEM-0001, STEM-0002, ... after the highest there is."""
    numbers = [path.name.removeprefix(f"{stem}-") for path in parent.glob(f"{stem}-*")]
    highest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    return str(parent / f"{stem}-{highest + 1:04d}")
