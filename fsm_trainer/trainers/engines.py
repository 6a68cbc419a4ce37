"""Which engines a configuration asks for, and where each one lives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.config import TrainConfig
from fsm_trainer.config.objective_settings import make_objective
from fsm_trainer.engines.base import RolloutEngine, SamplingParams, TrainEngine
from fsm_trainer.runtime.host import EngineHost, InlineHost, ProcessHost

if TYPE_CHECKING:
    from fsm_trainer.engines.hf_lora import LoraSettings


def make_train_engine(config: TrainConfig) -> TrainEngine:
    """The train engine of a resolved configuration; it loads nothing before `start`."""
    from fsm_trainer.engines.hf_train import HFTrainEngine

    assert config.ckpt is not None and config.train_devices is not None, config
    return HFTrainEngine(
        config.ckpt,
        objective=make_objective(config),
        loss=get_algorithm(config.algo).resolve_loss(),
        reference_refresh_steps=config.reference_refresh_steps or None,
        lr=config.lr,
        betas=(config.adam_beta1, config.adam_beta2),
        weight_decay=config.weight_decay,
        lr_decay_style=config.lr_decay_style,
        warmup=config.lr_warmup_steps,
        lr_decay_steps=config.lr_decay_steps,
        min_lr=config.min_lr,
        grad_clip_norm=config.grad_clip_norm,
        nonfinite=config.nonfinite,
        optimizer=config.optimizer,
        mini_bs=config.mini_bs,
        max_tokens_per_micro_batch=config.max_tokens_per_micro_batch,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        sequence_packing=config.sequence_packing,
        gradient_checkpointing=config.gradient_checkpointing,
        torch_compile=config.torch_compile,
        lora=lora_settings(config),
        temperature=config.temperature,
        device=config.train_devices,
        dtype=config.dtype,
        threads=config.threads,
        seed=config.seed,
    )


def lora_settings(config: TrainConfig) -> LoraSettings | None:
    """The adapters that are trained, the same for train and rollout engines; None when all weights are."""
    from fsm_trainer.engines.hf_lora import ALL_LINEAR, LoraSettings

    if config.lora_rank is None:
        return None
    targets = (config.lora_target_modules or ALL_LINEAR).split(",")
    return LoraSettings(
        config.lora_rank, config.lora_alpha or 2 * config.lora_rank, tuple(target.strip() for target in targets)
    )


def sampling_params(config: TrainConfig) -> SamplingParams:
    """How completions are drawn."""
    return SamplingParams(
        n_samples=config.n_samples,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
    )


def rollout_engine_factory(config: TrainConfig, engine: int) -> Callable[[], RolloutEngine]:
    """What makes rollout engine number `engine`; can be pickled, so that it can be made in another process."""
    from fsm_trainer.engines.hf_rollout import HFRolloutEngine

    assert config.ckpt is not None, config
    # The engine itself rather than a function of this module, or its process would import the whole trainer.
    return partial(
        HFRolloutEngine,
        config.ckpt,
        sampling_params(config),
        device=config.rollout_groups[engine][0],
        dtype=config.dtype,
        threads=config.threads,
        lora=lora_settings(config),
    )


def make_rollout_host(config: TrainConfig, engine: int) -> EngineHost:
    """The host of rollout engine number `engine`, started."""
    factory, name = rollout_engine_factory(config, engine), f"engine-{engine}"
    return ProcessHost(factory, name) if config.rollout_host == "process" else InlineHost(factory, name)
