"""What a step needs before it starts: libraries of extras, a compiler, and a token that ends a completion."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from fsm_trainer.config import hub
from fsm_trainer.config.errors import ConfigError, one_line
from fsm_trainer.config.train_config import TrainConfig


def check_step_needs(config: TrainConfig) -> None:
    """Raise ConfigError naming the setting and what to install for it."""
    needs = (
        ("--lora-rank", config.lora_rank is not None, "peft", "lora"),
        ("--optimizer adamw-8bit", config.optimizer == "adamw-8bit", "bitsandbytes", "bitsandbytes"),
    )
    for setting, wanted, library, extra in needs:
        if wanted and importlib.util.find_spec(library) is None:
            raise ConfigError(f"{setting} needs the extra {extra}: pip install 'fsm-trainer[{extra}]'")
    compilers = (os.environ.get("CXX", "g++"), "g++", "clang++")
    if config.torch_compile and config.train_devices == "cpu" and not any(map(shutil.which, compilers)):
        raise ConfigError("--torch-compile on a CPU needs a C++ compiler, and g++ is not there; install it or leave it")


def check_adapters(config: TrainConfig, model: dict[str, Any]) -> None:
    """Raise ConfigError for adapters that are larger than what they adapt. `model` is its config.json."""
    width = next((part["hidden_size"] for part in _parts(model) if isinstance(part.get("hidden_size"), int)), None)
    if config.lora_rank is not None and width is not None and config.lora_rank > width:
        raise ConfigError(
            f"--lora-rank is {config.lora_rank}, but the model's layers are {width} wide, and such adapters would be "
            f"larger than they are; give at most that, or leave it out"
        )


def _parts(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Where a model's config.json names things: in itself, or for a model of several kinds of input in a part of it."""
    text = model.get("text_config")
    return [model, text] if isinstance(text, dict) else [model]


def check_end_token(ckpt: str, model: dict[str, Any], tokenizer: Any) -> None:
    """Raise ConfigError when nothing names an EOS token: completions would only end at their longest.

    `model` is its config.json. A padding token is not needed: padding is never looked at, and EOS fills up.
    """
    if tokenizer.eos_token_id is not None or any(part.get("eos_token_id") is not None for part in _parts(model)):
        return
    folder, name = Path(ckpt).expanduser(), "generation_config.json"
    file = str(folder / name) if folder.is_dir() else hub.find_file(ckpt, name)
    if file is not None and Path(file).is_file():
        try:
            generation = json.loads(Path(file).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"--ckpt {ckpt}: its {name} cannot be read: {one_line(error)}") from error
        if isinstance(generation, dict) and generation.get("eos_token_id") is not None:
            return
    raise ConfigError(
        f"--ckpt {ckpt} names no EOS token; give its tokenizer an eos_token, or config.json an eos_token_id"
    )
