"""The settings of what is learnt: the pieces of the objective, each with the algorithm's own as default.

`algorithms/registry.py` has those defaults; here is what may be given instead, and the objective that comes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from fsm_trainer.algorithms.advantages import ADVANTAGES, AdvantageFn, AdvantageStd
from fsm_trainer.algorithms.objective import Aggregation, Correction, KLEstimator, Objective, SpanPolicy
from fsm_trainer.algorithms.registry import get_algorithm
from fsm_trainer.config.settings_group import SettingsGroup

if TYPE_CHECKING:
    from fsm_trainer.config.train_config import TrainConfig


class ObjectiveSettings(SettingsGroup):
    """What is learnt from a batch (docs/algorithms.md). Without a default of its own a setting is the algorithm's."""

    grpo_clip_eps: float = Field(0.2, gt=0, description="Clip range of the token ratio (grpo, dr-grpo, dapo)")
    gspo_clip_eps: float = Field(3e-4, gt=0, description="Clip range of the sequence ratio (gspo)")
    clip_eps: float | None = Field(
        None, gt=0, description="Clip range of any algorithm's ratio; wins over the two above"
    )
    clip_eps_high: float | None = Field(
        None, gt=0, description="Upper clip range where it differs from the lower (dapo: 0.28, cispo: 4)"
    )
    loss_aggregation: Aggregation | None = Field(
        None, description="Mean over all tokens of the batch, over sequences, or by a constant length"
    )
    advantage_std: AdvantageStd | None = Field(
        None, description="Whether advantages are divided by their group's standard deviation (dr-grpo: none)"
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of an entropy bonus")
    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the KL divergence to the reference model (0: no such model)"
    )
    kl_estimator: KLEstimator = Field("k3", description="Estimator of that divergence")
    reference_refresh_steps: int = Field(
        0, ge=0, description="Optimiser steps after which the reference becomes the current weights (0: never)"
    )
    offpolicy_correction: Correction | None = Field(
        None, description="What is done about weights older than the trained ones having sampled a batch"
    )
    correction_cap: float | None = Field(
        None, gt=0, description="Largest weight of the truncating corrections and of --async-span-policy correct (2)"
    )
    correction_band: str | None = Field(
        None, description="LOW,HIGH: ratios that the masking corrections let in (tokens: 0.5,5; sequences: 0.9,1.1)"
    )
    async_span_policy: SpanPolicy = Field(
        "keep",
        description="Tokens older than their sample's newest, when weights are loaded amid a generation: like any, "
        "left out of the loss, or weighted by one truncated ratio a span",
    )
    dynamic_sampling: bool | None = Field(
        None, description="Leave out prompts whose completions are all worth the same (default: dapo only)"
    )
    oversample_prompts: int | None = Field(
        None, ge=0, description="Spare prompts a batch generates to fill such gaps (default: half of --batch-size)"
    )
    overlong_buffer_tokens: int = Field(
        0, ge=0, description="Last tokens of --max-new-tokens that cost reward (0: none; DAPO's: a fifth of them)"
    )
    overlong_penalty: float = Field(1.0, gt=0, description="Reward lost by a completion of --max-new-tokens")

    @field_validator("correction_band")
    @classmethod
    def _check_band(cls, value: str | None) -> str | None:
        if value is not None and not _is_band(value):
            raise PydanticCustomError("band", "LOW,HIGH with 0 <= LOW < 1 < HIGH, such as 0.5,2")
        return value

    @property
    def band(self) -> tuple[float, float] | None:
        """`correction_band` as numbers."""
        return None if self.correction_band is None else _numbers(self.correction_band)


def _numbers(text: str) -> tuple[float, float]:
    low, high = map(float, text.split(","))
    return low, high


def _is_band(text: str) -> bool:
    try:
        low, high = _numbers(text)
    except ValueError:
        return False
    return 0 <= low < 1 < high < float("inf")


def make_objective(config: TrainConfig) -> Objective:
    """What a run minimises: the algorithm's preset with the settings that were given."""
    spec = get_algorithm(config.algo)
    own = "gspo_clip_eps" if spec.ratio_level == "sequence" else "grpo_clip_eps"
    named = own in config.model_fields_set and spec.surrogate == "clip"
    return spec.objective(
        max_new_tokens=config.max_new_tokens,
        clip_low=getattr(config, own) if config.clip_eps is None and named else config.clip_eps,
        clip_high=config.clip_eps_high,
        aggregation=config.loss_aggregation,
        entropy_coef=config.entropy_coef,
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        correction=config.offpolicy_correction,
        correction_cap=config.correction_cap,
        correction_band=config.band,
        span_policy=config.async_span_policy,
    )


def make_advantage(config: TrainConfig) -> AdvantageFn:
    """How a run makes advantages of rewards."""
    return get_algorithm(config.algo).advantage if config.advantage_std is None else ADVANTAGES[config.advantage_std]


def samples_dynamically(config: TrainConfig) -> bool:
    """Whether prompt groups without spread are left out."""
    given = config.dynamic_sampling
    return get_algorithm(config.algo).dynamic_sampling if given is None else given


def spare_prompts(config: TrainConfig) -> int:
    """Prompts generated per batch beyond those that are trained on."""
    if not samples_dynamically(config):
        return 0
    return (config.batch_size + 1) // 2 if config.oversample_prompts is None else config.oversample_prompts


def check_objective(config: TrainConfig) -> None:
    """Combinations that mean nothing; ValueError in one sentence."""
    if config.oversample_prompts and not samples_dynamically(config):
        raise ValueError(
            f"--oversample-prompts {config.oversample_prompts} has no meaning without "
            f"--dynamic-sampling; give both or none"
        )
    if config.overlong_buffer_tokens >= config.max_new_tokens:
        raise ValueError(
            f"--overlong-buffer-tokens is {config.overlong_buffer_tokens}, expected less than --max-new-tokens "
            f"{config.max_new_tokens}: it is the last part of it"
        )
    if config.reference_refresh_steps and not config.kl_coef:
        raise ValueError(
            f"--reference-refresh-steps {config.reference_refresh_steps} has no meaning without --kl-coef: there is no "
            f"reference model; give both or none"
        )
    _check_span_policy(config)
    correction = make_objective(config).correction
    if config.correction_band is not None and not correction.endswith("mask"):
        raise ValueError(
            f"--correction-band {config.correction_band} has no meaning with --offpolicy-correction {correction}; give "
            f"token-mask or sequence-mask"
        )
    caps = correction.endswith("truncate") or config.async_span_policy == "correct"
    if config.correction_cap is not None and not caps:
        raise ValueError(
            f"--correction-cap {config.correction_cap:g} has no meaning with --offpolicy-correction {correction}; give "
            f"token-truncate or sequence-truncate"
        )


def _check_span_policy(config: TrainConfig) -> None:
    spec, policy = get_algorithm(config.algo), config.async_span_policy
    if "async_span_policy" in config.model_fields_set and not spec.asynchronous:
        raise ValueError(
            f"--async-span-policy has no meaning with the synchronous --algo {config.algo}; leave it out or give "
            f"--algo async-{config.algo}"
        )
    if policy == "correct" and spec.ratio_level == "sequence":
        raise ValueError(
            f"--async-span-policy correct has no meaning with --algo {config.algo}, whose ratio is taken over all "
            f"spans of a sample already; give keep or mask"
        )
