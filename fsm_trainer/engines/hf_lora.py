"""LoRA through `peft`: putting adapters into a model in place, and what of it is trained, published and saved.

The adapted model stays the same object with the same forward pass, so train and rollout engine share all their code;
a snapshot carries the adapters alone. Knows nothing of optimisers or sampling.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fsm_trainer.engines.hf_model import LOADING, load_config

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of low rank (Hu et al. 2021). There is no dropout: the rollout's logprobs would be another policy's.

    Raises ValueError for a value that makes no adapter.
    """

    rank: int
    alpha: int
    """The adapter's output is scaled by alpha / rank (section 4.1)."""
    target_modules: tuple[str, ...] = (ALL_LINEAR,)
    """Names of the layers that get one, or "all-linear": all but the output layer."""

    def __post_init__(self) -> None:
        """Check every value."""
        if self.rank < 1:
            raise ValueError(f"lora_rank is {self.rank}, expected at least 1")
        if self.alpha < 1:
            raise ValueError(f"lora_alpha is {self.alpha}, expected at least 1")
        if not self.target_modules:
            raise ValueError(f"lora_target_modules names no layer, expected names with commas between or {ALL_LINEAR}")


def attach_lora(model: PreTrainedModel, settings: LoraSettings, seed: int = 0) -> PeftModel:
    """Put adapters into `model` and freeze all else; what is returned wraps the same model, to save it.

    The adapters are float32, and change nothing until they are trained. Raises ValueError when `peft` is not
    installed or a target matches no layer.
    """
    if importlib.util.find_spec("peft") is None:
        raise ValueError("lora_rank needs the extra 'lora': pip install 'fsm-trainer[lora]'")
    from peft import LoraConfig, get_peft_model

    _check_targets(model, settings.target_modules)
    everything = ALL_LINEAR in settings.target_modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=0.0,
        target_modules=ALL_LINEAR if everything else list(settings.target_modules),
        task_type="CAUSAL_LM",
    )
    with LOADING, torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft still asks transformers by a name that is on its way out.
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(seed)
        adapted: PeftModel = get_peft_model(model, config)
    if model.name_or_path and Path(model.name_or_path).is_dir():
        # Written into each checkpoint, from which it must be found whatever the working folder is.
        adapted.peft_config["default"].base_model_name_or_path = str(Path(model.name_or_path).absolute())
    adapted.eval()
    return adapted


def check_targets(ckpt: str, targets: tuple[str, ...]) -> None:
    """ValueError when one of them is no layer of the checkpoint's model, whose weights are not read."""
    from transformers import AutoModelForCausalLM

    config = load_config(ckpt)
    with LOADING, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    _check_targets(model, targets)


def trained_parameters(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Names and values of what is trained: all parameters, or the adapters alone; a tied one has one name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def _check_targets(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    names = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    for target in targets:
        if target != ALL_LINEAR and not any(name == target or name.endswith(f".{target}") for name in names):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise ValueError(
                f"lora_target_modules names {target!r}, which matches no layer of the {type(model).__name__}; it has "
                f"{known}; or give {ALL_LINEAR}"
            )
