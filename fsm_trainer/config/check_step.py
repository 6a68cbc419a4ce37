"""What a step's settings need of this machine: libraries of extras, and a compiler."""

from __future__ import annotations

import importlib.util
import os
import shutil

from fsm_trainer.config.errors import ConfigError
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
