"""The settings of how an optimiser step is computed: its micro-batches, precision, memory, and which weights it trains.

None of them changes what is learnt from a batch beyond rounding, but `lora_*`. docs/training-step.md explains them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fsm_trainer.config.settings_group import SettingsGroup

if TYPE_CHECKING:
    from fsm_trainer.config.train_config import TrainConfig


class StepSettings(SettingsGroup):
    """How a step is computed (docs/training-step.md)."""

    mini_bs: int = Field(16, ge=1, description="Sequences per forward and backward pass (micro-batch)")
    max_tokens_per_micro_batch: int | None = Field(
        None, ge=1, description="Tokens per micro-batch, instead of --mini-bs sequences (default: no budget)"
    )
    gradient_accumulation_steps: int | None = Field(
        None, ge=1, description="Micro-batches per optimiser step (default: as many as the batch has)"
    )
    sequence_packing: Literal["auto", "on", "off"] = Field(
        "auto", description="Put sequences one behind the other instead of padding (auto: with flash attention)"
    )
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Type of the computation and the served weights; trained weights stay float32"
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep each layer's input only and compute the rest again: less memory, a third more time"
    )
    torch_compile: bool = Field(False, description="Compile the trained model's layers; the first steps take longer")
    optimizer: Literal["adamw", "adamw-8bit"] = Field(
        "adamw", description="adamw-8bit keeps its moments in 8 bits (extra bitsandbytes)"
    )
    nonfinite: Literal["error", "skip"] = Field(
        "error", description="A loss or gradient that is not finite: fails the run, or its batch gives no step"
    )
    lora_rank: int | None = Field(
        None, ge=1, description="Train adapters of this rank instead of all weights (extra lora; default: all weights)"
    )
    lora_alpha: int | None = Field(
        None, ge=1, description="Adapters are scaled by this over their rank (default: twice the rank)"
    )
    lora_target_modules: str | None = Field(
        None, description="Layers with an adapter, with commas between (default: all linear ones but the output)"
    )


def check_step(config: TrainConfig) -> None:
    """Combinations that mean nothing or cannot be; ValueError in one sentence."""
    if config.max_tokens_per_micro_batch is None:
        _check_rows(config)
    else:
        _check_budget(config, config.max_tokens_per_micro_batch)
    if config.lora_rank is None:
        for name in ("lora_alpha", "lora_target_modules"):
            if getattr(config, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} has no meaning without --lora-rank; give both or neither")
    elif config.lora_target_modules is not None and not all(config.lora_target_modules.split(",")):
        raise ValueError(
            f"--lora-target-modules is {config.lora_target_modules}, expected names of layers with commas between, "
            f"such as q_proj,v_proj"
        )


def _check_rows(config: TrainConfig) -> None:
    steps, needed = config.gradient_accumulation_steps, math.ceil(config.rows_per_batch / config.mini_bs)
    if steps is not None and steps < needed:
        raise ValueError(
            f"--gradient-accumulation-steps is {steps}, but a batch of {config.rows_per_batch} sequences has "
            f"{needed} micro-batches of --mini-bs {config.mini_bs} and gives one optimiser step; "
            f"give at least {needed} or leave it out"
        )


def _check_budget(config: TrainConfig, budget: int) -> None:
    longest = config.max_prompt_tokens + config.max_new_tokens
    if budget < longest:
        raise ValueError(
            f"--max-tokens-per-micro-batch is {budget}, but --max-prompt-tokens {config.max_prompt_tokens} and "
            f"--max-new-tokens {config.max_new_tokens} allow a sequence of {longest}; give at least that"
        )
    if config.gradient_accumulation_steps is not None:
        raise ValueError(
            "--gradient-accumulation-steps counts micro-batches of --mini-bs sequences and has no meaning with "
            "--max-tokens-per-micro-batch; leave it out"
        )
